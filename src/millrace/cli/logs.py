"""The log of a command on stderr."""

from __future__ import annotations

import logging

from millrace.errors import printable, without_queries

_installed: logging.Handler | None = None


def log_to_stderr(level: str | None, *, without: tuple[str, ...] = ()) -> None:
    """Log Millrace's records of at least `level` to stderr, one line each, without events whose names begin with `without`.

    None: as Python does by default, which shows the text of warnings and errors. A second call replaces the first.
    """
    global _installed
    logger = logging.getLogger("millrace")
    if _installed is not None:
        logger.removeHandler(_installed)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        _installed = None
    if level is None:
        return
    _installed = logging.StreamHandler()
    _installed.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s"))
    _installed.addFilter(lambda record: not (without and getattr(record, "event", "").startswith(without)))
    logger.addHandler(_installed)
    logger.setLevel(level.upper())
    logger.propagate = False


def log_others_to_stderr(printed: tuple[str, ...]) -> None:
    """Log warnings with time and level, without events whose names begin with `printed`: the command prints these.

    Only if the command line did not choose a level.
    """
    if _installed is None:
        log_to_stderr("warning", without=printed)


class _OneLine(logging.Formatter):
    """One line for each record, without control characters of names and without signatures of web addresses."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_queries(super().format(record)))
