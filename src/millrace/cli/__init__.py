"""The command line `millrace`: thin commands over the library.

Exit codes: 0 done; 1 an error, told in one line on stderr; 2 a command line that cannot be understood; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from millrace._version import __version__
from millrace.errors import MillraceError

EPILOG = "Exit codes: 0 done; 1 an error, told in one line on stderr; 2 a bad command line; 130 interrupted."


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="millrace")
def millrace() -> None:
    """The I/O layer of a Ray training cluster: data sets in through a cache, checkpoints out compressed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from millrace.cli.demo import demo
    from millrace.cli.status import status

    millrace.add_command(demo)
    millrace.add_command(status)
    try:
        result = millrace.main(args=arguments, prog_name="millrace", standalone_mode=False)
    except click.exceptions.Abort:
        return _interrupted()
    except KeyboardInterrupt:
        return _interrupted()
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "millrace"
        click.echo(f"millrace: {error.format_message().rstrip('.')}: see '{command} --help'", err=True)
        return error.exit_code
    except MillraceError as error:
        click.echo(f"millrace: {error}", err=True)
        return 1
    except BrokenPipeError:
        # Whoever read our output has enough (`millrace status | head`).
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def _interrupted() -> int:
    click.echo("millrace: interrupted; nothing is left running", err=True)
    return 130
