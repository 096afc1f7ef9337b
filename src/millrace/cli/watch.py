"""`--watch`: a command that prints its result again and again, until Ctrl-C."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from millrace.cli.common import NumberRange, is_terminal, json_text
from millrace.cli.interrupts import check, remembered
from millrace.errors import MillraceError, printable, without_queries

F = TypeVar("F", bound=Callable[..., object])

_CLEAR = "\x1b[H\x1b[J"
_END_OF_LINE = "\x1b[K"


def watch_option(command: F) -> F:
    """`--watch`."""
    text = "Show it again every --interval seconds, until Ctrl-C."
    return click.option("--watch", "-w", is_flag=True, help=text)(command)


def interval_option(command: F) -> F:
    """`--interval`."""
    return click.option(
        "--interval",
        type=NumberRange(0.1, 3600),
        default=2.0,
        show_default=True,
        metavar="SECONDS",
        help="Time between two outputs.",
    )(command)


def repeat(
    read: Callable[[], Any], lines: Callable[[Any], Sequence[str]], *, interval: float, as_json: bool, count: int = 0
) -> None:
    """Print the result of `read` every `interval` seconds, `count` times or until Ctrl-C, which is the normal end.

    `lines` makes the text for people. A terminal shows the newest state only; another output gets one block after the other.
    With `as_json` each state is one line. The first error of `read` is raised; a later one is shown in place of a state.
    """
    done = 0
    try:
        with remembered():
            while True:
                began = time.monotonic()
                error = None
                try:
                    state = read()
                except MillraceError as failure:  # such as a node that restarts
                    if done == 0:
                        raise
                    error = printable(without_queries(str(failure)))
                if as_json:
                    click.echo(json_text(state if error is None else {"error": error}).replace("\n", ""))
                else:
                    _show(lines(state) if error is None else [error], is_first=done == 0)
                sys.stdout.flush()
                done += 1
                if done == count:
                    return
                check()  # Python may have discarded a Ctrl-C
                time.sleep(max(0.0, interval - (time.monotonic() - began)))
    except KeyboardInterrupt as end:
        if len(end.args) == 2 and end.args[1] != 130:  # SIGTERM and SIGHUP keep their exit codes
            raise


def _show(lines: Sequence[str], *, is_first: bool) -> None:
    if not is_terminal(sys.stdout):
        click.echo("\n".join(lines) if is_first else "\n" + "\n".join(lines))
        return
    columns, rows = shutil.get_terminal_size()
    shown = [*lines[: rows - 2], *(["..."] if len(lines) > rows - 1 else lines[rows - 2 :])]
    text = "\n".join(line[: columns - 1] + _END_OF_LINE for line in shown)
    click.echo(f"{_CLEAR if is_first else chr(27) + '[H'}{text}\x1b[J")
