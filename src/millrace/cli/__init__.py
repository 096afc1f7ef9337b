"""The command line `millrace`: thin commands over the library. The contract is `docs/reference/command-line.md`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import traceback
from collections.abc import Sequence

import click

from millrace._version import __version__
from millrace.errors import MillraceError

EPILOG = (
    "Exit codes: 0 done; 1 an error, told in one line on stderr; 2 a bad command line; 3 the cache is full (load), "
    "damage was found (checkpoints verify), or a difference (checkpoints diff); "
    "130 interrupted; 141 whoever read "
    "the output closed it; 143 terminated; 129 hung up. MILLRACE_DEBUG=1 adds the traceback of an error."
)


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="millrace")
def millrace() -> None:
    """The I/O layer of a Ray training cluster: data sets in through a cache, checkpoints out compressed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        add_commands()  # inside: these imports take a while, and Ctrl-C may come meanwhile
        if completion := os.environ.get("_MILLRACE_COMPLETE"):
            from click.shell_completion import shell_complete

            return shell_complete(millrace, {}, "millrace", "_MILLRACE_COMPLETE", completion)
        # Not `millrace.main`: click takes every EPIPE for the end of stdout, and every EOFError for Ctrl-D.
        with millrace.make_context("millrace", given) as context:
            result = millrace.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt) as end:
        # A signal other than Ctrl-C comes as a `KeyboardInterrupt` that says so.
        word, code = end.args if len(end.args) == 2 else ("interrupted", 130)
        tell(f"{word}; nothing is left running")
        return int(code)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help of a group; click before 8.2 lacks it
            click.echo(error.format_message(), err=True)
            return error.exit_code
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "millrace"
        message = " ".join(error.format_message().split())  # click writes a choice's values below each other
        tell(f"{message.rstrip('.')}: see '{path} --help'")
        return error.exit_code
    except MillraceError as error:
        tell(str(error))
        _debug()
        return 1
    except BrokenPipeError as error:
        return 141 if _stdout_is_closed() else _unexpected(error)
    except OSError as error:
        if not _is_of_stdout(error):
            return _unexpected(error)
        tell(f"the output could not be written: {error.strerror}: see to where stdout goes")
        return 1
    except Exception as error:  # noqa: BLE001 - the last resort: whatever it is, one line and an exit code
        return _unexpected(error)
    finally:
        _end_stdout()


def add_commands() -> None:
    """Import the commands. Again, it changes nothing."""
    from millrace.cli.checkpoints import checkpoints
    from millrace.cli.demo import demo
    from millrace.cli.doctor import doctor
    from millrace.cli.load import load
    from millrace.cli.ls import ls
    from millrace.cli.node import node
    from millrace.cli.rules import free, limit, pin, resize, unpin
    from millrace.cli.status import status

    for command in (checkpoints, demo, doctor, free, limit, load, ls, node, pin, resize, status, unpin):
        millrace.add_command(command)


def _unexpected(error: Exception) -> int:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    hint = "" if os.environ.get("MILLRACE_DEBUG") == "1" else "MILLRACE_DEBUG=1 shows where; "
    tell(f"unexpected {text}: {hint}please report this as a defect of Millrace")
    _debug()
    return 1


def tell(line: str) -> None:
    """Write an error, or what is worth knowing besides the result, in one line to stderr."""
    with contextlib.suppress(OSError):  # stderr is gone as well: the exit code is all that can still be told
        # A name that was no UTF-8 is shown all the same.
        click.echo(f"millrace: {line}".encode("utf-8", "backslashreplace").decode(), err=True)


def _debug() -> None:
    if os.environ.get("MILLRACE_DEBUG") == "1":
        traceback.print_exc()


def _stdout_is_closed() -> bool:
    """Whether stdout is a pipe that nobody reads any more (`millrace status | true`)."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False


def _is_of_stdout(error: OSError) -> bool:
    """Whether writing the output failed, as on a full disk: every command writes by `click.echo`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == click.utils.__name__


def _end_stdout() -> None:
    """Write what is still buffered. Where that fails, drop it: Python would print a warning of its own at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)
        except (OSError, ValueError):
            pass  # not a real file, so Python will not flush it either
