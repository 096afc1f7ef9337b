"""The command line `millrace`: thin commands over the library. The reference is `docs/reference/command-line.md`.

Key terms:
- command: a click command in a module of its own, registered in `add_commands` of `app.py`.
- message: one line on stderr; results go to stdout.
- exit code: 0 is success, 1 an error, 2 a wrong command line; see `EPILOG` in `app.py`.

Start reading in `app.py`, then `common.py` (options and the cache that a command means) and `ls.py`, a short command.
"""

from millrace.cli.app import add_commands, main, millrace

__all__ = ["add_commands", "main", "millrace"]
