"""The root command: it parses the command line, runs a command, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Sequence

import click

from millrace._version import __version__
from millrace.cli.commands import MAX_WIDTH, GroupedCommands
from millrace.cli.common import print_message
from millrace.cli.logs import log_to_stderr
from millrace.errors import MillraceError

EPILOG = (
    "Exit codes: 0 success; 1 error, reported in one line on stderr; 2 wrong command line; 3 the cache is full (load, "
    "files), damage was found (checkpoints verify), or the checkpoints differ (checkpoints diff); 129 hung up; 130 "
    "interrupted; 141 the reader closed the output; 143 terminated. Set MILLRACE_DEBUG=1 for the traceback of an error."
)


SECTIONS = {
    "Cached data": ("load", "files", "ls", "pin", "unpin", "free", "limit", "resize"),
    "Checkpoints": ("checkpoints",),
    "Cluster": ("node",),
    "Observe": ("status", "stats"),
    "Plan and diagnose": ("plan", "doctor", "config", "debug"),
}
"""The sections of `millrace --help`. Every command is in one of them."""


@click.group(
    cls=GroupedCommands,
    sections=SECTIONS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
)
@click.version_option(__version__, prog_name="millrace")
@click.option("--quiet", "-q", is_flag=True, help="No progress, remarks and warnings on stderr; only errors.")
@click.option("--verbose", "-v", count=True, help="Log events to stderr; -vv: every detail.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="The least level of logged lines, instead of --quiet and --verbose.",
)
def millrace(quiet: bool, verbose: int, log_level: str | None) -> None:
    """The I/O layer of a Ray training cluster: cached data sets and compressed checkpoints.

    These options come before the command: millrace -v load s3://bucket/train.
    """
    if quiet and verbose:
        raise click.UsageError("--quiet and --verbose exclude each other")
    log_to_stderr(log_level or ("error" if quiet else {0: None, 1: "info"}.get(verbose, "debug")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # closed before the start; click would drop the output without an error
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    try:
        add_commands()  # inside `try`: these imports take time, and Ctrl-C may arrive
        if completion := os.environ.get("_MILLRACE_COMPLETE"):
            from click.shell_completion import shell_complete

            return shell_complete(millrace, {}, "millrace", "_MILLRACE_COMPLETE", completion)
        # Not `millrace.main`: click treats every EPIPE as the end of stdout, and every EOFError as Ctrl-D.
        with millrace.make_context("millrace", given) as context:
            result = millrace.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt) as end:
        # A signal other than Ctrl-C arrives as a `KeyboardInterrupt` with its name and exit code.
        word, code = end.args if len(end.args) == 2 else ("interrupted", 130)
        print_message(f"{word}; nothing is left running")
        return int(code)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help of a group; missing before click 8.2
            click.echo(error.format_message(), err=True)
            return error.exit_code
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "millrace"
        message = " ".join(error.format_message().split())  # click writes a choice's values below each other
        next_step = _before_the_command(error, path) or f"see '{path} --help'"
        print_message(f"{message.rstrip('.')}: {next_step}")
        return error.exit_code
    except MillraceError as error:
        print_message(str(error))
        _debug()
        return 1
    except BrokenPipeError as error:
        return 141 if _stdout_is_closed() else _unexpected(error)
    except OSError as error:
        if not _is_of_stdout(error):
            return _unexpected(error)
        print_message(f"the output could not be written: {error.strerror}: check the target of stdout")
        return 1
    except Exception as error:  # noqa: BLE001 - the last resort: any exception becomes one line and an exit code
        return _unexpected(error)
    finally:
        _end_stdout()


def add_commands() -> None:
    """Import and register the commands. Idempotent."""
    from millrace.cli.checkpoints import checkpoints
    from millrace.cli.config import config
    from millrace.cli.debug import debug
    from millrace.cli.doctor import doctor
    from millrace.cli.files import files
    from millrace.cli.load import load
    from millrace.cli.ls import ls
    from millrace.cli.node import node
    from millrace.cli.plan import plan
    from millrace.cli.rules import free, limit, pin, resize, unpin
    from millrace.cli.stats import stats
    from millrace.cli.status import status

    for command in (
        checkpoints, config, debug, doctor, files, free, limit, load, ls, node, pin, plan, resize, stats, status, unpin,
    ):  # fmt: skip
        millrace.add_command(command)


def _before_the_command(error: click.ClickException, path: str) -> str | None:
    """The next step if a command got an option of `millrace` itself; else None."""
    if not isinstance(error, click.NoSuchOption) or path == "millrace":
        return None
    for option in millrace.params:
        if isinstance(option, click.Option) and error.option_name in option.opts:
            value = "" if option.is_flag or option.count else " ..."
            return f"it goes before the command: 'millrace {error.option_name}{value}{path.removeprefix('millrace')}'"
    return None


def _unexpected(error: Exception) -> int:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    hint = "" if os.environ.get("MILLRACE_DEBUG") == "1" else "MILLRACE_DEBUG=1 shows the traceback; "
    print_message(f"unexpected {text}: {hint}please report this as a defect of Millrace")
    _debug()
    return 1


def _debug() -> None:
    if os.environ.get("MILLRACE_DEBUG") == "1":
        traceback.print_exc()


def _stdout_is_closed() -> bool:
    """Whether stdout is a pipe without a reader (`millrace status | true`)."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False


def _is_of_stdout(error: OSError) -> bool:
    """Whether the error comes from writing the output, as on a full disk. Every command writes with `click.echo`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == click.utils.__name__


def _end_stdout() -> None:
    """Flush stdout. If that fails, drop the buffer: Python would print its own warning at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)
        except (OSError, ValueError):
            pass  # not a real file: Python does not flush it either
