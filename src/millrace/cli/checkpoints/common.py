"""What the commands about checkpoints have in common: which checkpoint is meant, tables, and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from millrace.cli.common import require_host, time_text
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.checkpoint.run.run_layout import Found
    from millrace.checkpoint.tools.progress import WorkProgress

F = TypeVar("F", bound=Callable[..., object])

DIFFERENT = 3
"""The exit code when something is damaged, or different."""

_ROWS = 40
_LINE_SECONDS = 10.0


def step_option(command: F) -> F:
    """`--step`."""
    text = "The checkpoint of this step, where URL is a run. Default: the newest complete one."
    return click.option("--step", type=click.IntRange(min=0), metavar="N", help=text)(command)


def keys_option(command: F) -> F:
    """`--keys`, several times."""
    text = "Only these: a key, what keys begin with before a dot, or a pattern ('model.*.weight'). Repeat for several."
    return click.option("--keys", multiple=True, metavar="PATTERN", help=text)(command)


def threads_option(command: F) -> F:
    """`--threads`, `-j`."""
    text = "Threads that read and decode. Default: one a core, up to eight."
    return click.option("--threads", "-j", type=click.IntRange(1, 256), metavar="N", help=text)(command)


def all_option(command: F) -> F:
    """`--all`: lists are not cut."""
    return click.option("--all", "everything", is_flag=True, help=f"All rows, in place of the first {_ROWS}.")(command)


# --- which checkpoint is meant --------------------------------------------------------------------------


def options_of(url: str, endpoint_url: str | None) -> dict[str, Any] | None:
    """The options of the storage that `url` is of. An endpoint means nothing to local files."""
    from millrace.origin import options_for

    options = options_for(url, endpoint_url)
    if options:
        require_host(endpoint_url)
    return options


def is_checkpoint(url: str, options: dict[str, Any] | None) -> bool:
    """Whether `url` is one checkpoint, complete or not, and no run."""
    from millrace.checkpoint.places.manifests import STOCK_METADATA_NAME, manifest_name
    from millrace.checkpoint.places.storage import open_storage
    from millrace.checkpoint.run.run_layout import parse_name
    from millrace.errors import MissingError

    storage = open_storage(url, options)
    if parse_name(url.rstrip("/").rpartition("/")[2]):
        return True
    for name in (manifest_name(), manifest_name(0), STOCK_METADATA_NAME):
        with contextlib.suppress(MissingError):
            storage.stat(name)
            return True
    return False


def checkpoint_url(url: str, step: int | None, endpoint_url: str | None) -> str:
    """The URL of the checkpoint that is meant.

    Raises `CheckpointNotFoundError`, naming what there is, and `UsageError` for a step of what is no run.
    """
    from millrace.checkpoint.run.run_layout import open_run
    from millrace.checkpoint.run.timeline import newest_first
    from millrace.errors import CheckpointNotFoundError, MissingError, UsageError

    options = options_of(url, endpoint_url)
    if is_checkpoint(url, options):
        if step is not None:
            raise UsageError(f"{url} is one checkpoint, not a run", next_step="leave --step out, or give the run's URL")
        return url
    run = open_run(url, options)
    try:
        found = [each for each in run.scan() if each.complete]
    except MissingError:
        found = []
    if not found:
        raise CheckpointNotFoundError(
            f"neither a complete checkpoint nor a run with one lies at {url}",
            next_step="check the name; 'millrace checkpoints ls' shows what is there",
        )
    if step is None:
        return run.url_of(newest_first(found)[0].name)
    wanted = [each for each in found if each.step == step and not each.superseded]
    if not wanted:
        raise CheckpointNotFoundError(f"{url} has no complete checkpoint of step {step}", next_step=_near(step, found))
    return run.url_of(wanted[0].name)


def _near(step: int, found: Sequence[Found]) -> str:
    steps = sorted({each.step for each in found}, key=lambda other: (abs(other - step), other))[:3]
    return f"the nearest are of step {', '.join(map(str, sorted(steps)))}; 'millrace checkpoints ls' shows all"


# --- figures for people ---------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> list[str]:
    """Rows below their columns; those named in `right` are flush right."""
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]

    def cell(place: int, text: str) -> str:
        return text.rjust(widths[place]) if columns[place] in right else text.ljust(widths[place])

    return ["  ".join(cell(place, text) for place, text in enumerate(line)).rstrip() for line in lines]


def cut(rows: Sequence[Any], *, everything: bool) -> tuple[Sequence[Any], int]:
    """The rows that are shown, and how many more there are."""
    # One more than the limit fits into the line that would name it.
    return (rows, 0) if everything or len(rows) <= _ROWS + 1 else (rows[:_ROWS], len(rows) - _ROWS)


def shape_text(shape: Sequence[int]) -> str:
    """`4096x1024`; a scalar is `()`."""
    return "x".join(map(str, shape)) or "()"


def step_text(step: int, revision: int) -> str:
    """`100`, or `100-r1` for the second save of this step."""
    return f"{step}-r{revision}" if revision else f"{step}"


def ratio_text(stored_bytes: int, raw_bytes: int) -> str:
    """How much of the size is left: `0.66`."""
    return f"{stored_bytes / raw_bytes:.2f}" if raw_bytes else "-"


def counted(number: int, thing: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def duration_text(seconds: float) -> str:
    """A duration; a short one with a tenth of a second."""
    return f"{seconds:.1f} s" if seconds < 10 else time_text(seconds)


def date_text(seconds: float) -> str:
    """A point in time, local: `2026-11-22 01:32:53`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def iso_text(seconds: float) -> str:
    """The same in UTC for programs: `2026-11-22T01:32:53Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def json_text(content: Any) -> str:
    """JSON for programs. Numbers that it has no word for (nan, the infinities) are null, other values their `repr`."""
    return json.dumps(json.loads(json.dumps(content, default=repr), parse_constant=lambda word: None))


# --- progress -------------------------------------------------------------------------------------------


class Display:
    """Progress on stderr: a bar on a terminal, else a line every ten seconds. `last` is what it was told last."""

    def __init__(self, verb: str) -> None:
        self.last: WorkProgress | None = None
        self._verb = verb
        self._began = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._began + (0.0 if self._terminal else _LINE_SECONDS)
        self._shown = False

    def __call__(self, state: WorkProgress) -> None:
        self.last = state
        now = time.monotonic()
        if now < self._next:
            return
        text = self._text(state, now - self._began)
        if not self._terminal:
            self._next += _LINE_SECONDS
            click.echo(text, err=True)
            return
        self._next = now + 0.1
        columns = shutil.get_terminal_size().columns
        room = min(30, columns - len(text) - 4)
        if room >= 5 and state.total_bytes:
            full = round(room * state.done_bytes / state.total_bytes)
            text = f"[{'#' * full}{'.' * (room - full)}] {text}"
        click.echo(f"\r{text[: columns - 1]}\x1b[K", err=True, nl=False)
        self._shown = True

    def end(self) -> None:
        """Leave the line."""
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._shown = False

    def far(self) -> str:
        """How far it came, for who was interrupted."""
        if self.last is None:
            return f"nothing was {self._verb} yet"
        return f"{size_text(self.last.done_bytes)} of {size_text(self.last.total_bytes)} were {self._verb}"

    def _text(self, state: WorkProgress, seconds: float) -> str:
        rate = state.done_bytes / seconds if seconds else 0.0
        left = (state.total_bytes - state.done_bytes) / rate if rate else 0.0
        percent = f"{100 * state.done_bytes // state.total_bytes}%, " if state.total_bytes else ""
        return (
            f"{percent}{size_text(state.done_bytes)} of {size_text(state.total_bytes)} {self._verb}, {size_text(rate)}/s"
            + (f", {time_text(left)} left" if left >= 1 else "")
            + (f", {state.problems} problems" if state.problems else "")
        )


@contextlib.contextmanager
def shown(display: Display, *, after: str = "") -> Iterator[None]:
    """Clear the display at the end of the block; an interrupt ends the command with its exit code, and one line.

    That line says how far it came, or what comes `after`.
    """
    from millrace.cli import tell
    from millrace.demo import interrupts

    try:
        with interrupts.remembered():
            yield
    except KeyboardInterrupt as end:
        display.end()
        word, code = end.args if len(end.args) == 2 else ("interrupted", 130)
        tell(f"{word}: {after or display.far()}")
        raise click.exceptions.Exit(code) from end
    finally:
        display.end()
