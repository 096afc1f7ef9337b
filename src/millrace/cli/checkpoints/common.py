"""Shared by the checkpoint commands: selecting a checkpoint, tables, and progress on stderr."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from millrace.cli.common import ProgressLine, counted, require_host, table, time_text
from millrace.errors import CheckpointNotFoundError, ConfigurationError, MillraceError, UsageError
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.checkpoint.run.run_layout import ListedCheckpoint, Run
    from millrace.checkpoint.tools import WorkProgress

F = TypeVar("F", bound=Callable[..., object])

DIFFERENT = 3
"""The exit code if a checkpoint is damaged, or two differ."""

_ROWS = 40
_LOOKED_INTO = 10  # directories of a level that are searched for runs, with a request each


def step_option(command: F) -> F:
    """`--step`."""
    text = "The checkpoint of this step, if URL is a run. Default: the newest complete one."
    return click.option("--step", type=click.IntRange(min=0), metavar="N", help=text)(command)


def keys_option(command: F) -> F:
    """`--keys`, several times."""
    text = (
        "Only these keys: a key, a prefix up to a dot, or a pattern ('a.*.b'; * also matches dots). Repeat for several."
    )
    return click.option("--keys", multiple=True, metavar="PATTERN", help=text)(command)


def threads_option(command: F) -> F:
    """`--threads`, `-j`."""
    text = "Threads that read and decode. Default: one per core, up to eight."
    return click.option("--threads", "-j", type=click.IntRange(1, 256), metavar="N", help=text)(command)


def trust_option(command: F) -> F:
    """`--trust`, several times."""
    text = "An allowed class of values, such as a tensor subclass. MODULE is imported. Repeat for several."
    return click.option("--trust", multiple=True, metavar="MODULE:CLASS", help=text)(command)


def trusted_types(names: Sequence[str]) -> list[type]:
    """The classes that `--trust` names. Raises `ConfigurationError`."""
    found: list[type] = []
    for name in names:
        module, colon, path = name.partition(":")
        try:
            kind: Any = importlib.import_module(module)
            for part in path.split("."):
                kind = getattr(kind, part)
        except Exception as error:  # importing runs the module, which may raise anything
            problem = f"{type(error).__name__}: {error!s:.200}"
            raise ConfigurationError(
                f"--trust {name}: {problem}",
                next_step="give a class that can be imported, as package.module:Class",
            ) from error
        if not colon or not isinstance(kind, type):
            raise ConfigurationError(f"--trust {name}: not a class", next_step="write package.module:Class")
        found.append(kind)
    return found


def all_option(command: F) -> F:
    """`--all`: lists are not truncated."""
    return click.option("--all", "everything", is_flag=True, help=f"All rows instead of the first {_ROWS}.")(command)


# --- selecting a checkpoint -----------------------------------------------------------------------------


def options_of(url: str, endpoint_url: str | None) -> dict[str, Any] | None:
    """The options of the storage of `url`. An endpoint does not apply to local files."""
    from millrace.origin import options_for

    options = options_for(url, endpoint_url)
    if options:
        require_host(endpoint_url)
    return options


def is_checkpoint(url: str, options: dict[str, Any] | None) -> bool:
    """Whether `url` is one checkpoint, complete or not, and not a run."""
    from millrace.checkpoint.run.run_layout import parse_name
    from millrace.checkpoint.storage.base import has_file
    from millrace.checkpoint.storage.manifests import STOCK_METADATA_NAME, manifest_name
    from millrace.checkpoint.storage.storage import open_storage

    storage = open_storage(url, options)
    if parse_name(url.rstrip("/").rpartition("/")[2]):
        return True
    return any(has_file(storage, name) for name in (manifest_name(), manifest_name(0), STOCK_METADATA_NAME))


def checkpoints_in(run: Run, url: str, options: Mapping[str, Any] | None) -> Sequence[ListedCheckpoint]:
    """The checkpoints of a run, complete or not. None in a run without a save, and in an empty directory.

    Raises `CheckpointNotFoundError` if nothing is there, or only other files: `url` is probably misspelt, or the directory
    above a run.
    """
    from millrace.checkpoint.run.claims import is_claim
    from millrace.checkpoint.storage.storage import LocalStorage

    listing = run.look()
    if listing.checkpoints or listing.empty or any(is_claim(file.name) for file in listing.files):
        return listing.checkpoints
    if isinstance(run.storage, LocalStorage) and _is_empty_directory(run.url):
        return ()
    runs = ", ".join(f"{run.url.rstrip('/')}/{name}" for name in _runs_below(url, options))
    raise CheckpointNotFoundError(
        f"{run.url}: no checkpoint found",
        next_step=f"give the directory of a run, such as {runs}"
        if runs
        else "give the directory of a run, or of one checkpoint",
    )


def _runs_below(url: str, options: Mapping[str, Any] | None) -> list[str]:
    """The names of up to three runs directly below a directory, of its first directories; none if it cannot be listed."""
    from millrace.checkpoint.run.run_layout import parse_name
    from millrace.origin import origin_for_url

    found: list[str] = []
    with contextlib.suppress(MillraceError):
        origin, key = origin_for_url(url, options)
        for below in sorted(origin.list_level(key.rstrip("/")).prefixes)[:_LOOKED_INTO]:
            if any(parse_name(name.rpartition("/")[2]) for name in origin.list_level(below).prefixes):
                found.append(below.rpartition("/")[2])
    return found[:3]


def _is_empty_directory(path: str) -> bool:
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except OSError:  # missing, or not a directory
        return False


def checkpoint_url(url: str, step: int | None, endpoint_url: str | None) -> str:
    """The URL of the checkpoint that `url` and `step` select. A Hugging Face directory counts as a checkpoint.

    Raises `CheckpointNotFoundError` with the nearest steps, and `UsageError` for a step if `url` is not a run.
    """
    from millrace.checkpoint.format.safetensors import INDEX_NAME, SINGLE_NAME
    from millrace.checkpoint.run.run_layout import open_run
    from millrace.checkpoint.run.timeline import newest_first
    from millrace.checkpoint.storage.base import has_file
    from millrace.checkpoint.storage.storage import open_storage

    options = options_of(url, endpoint_url)
    if is_checkpoint(url, options):
        if step is not None:
            raise UsageError(f"{url} is one checkpoint, not a run", next_step="omit --step, or give the URL of the run")
        return url
    run = open_run(url, options)
    found = [each for each in run.scan() if each.complete]
    if not found:
        storage = open_storage(url, options)
        if step is None and (has_file(storage, INDEX_NAME) or has_file(storage, SINGLE_NAME)):
            return url
        raise CheckpointNotFoundError(
            f"{url}: not a complete checkpoint, nor a run with one",
            next_step="check the name; 'millrace checkpoints ls' lists the checkpoints of a run",
        )
    if step is None:
        return run.url_of(newest_first(found)[0].name)
    wanted = [each for each in found if each.step == step and not each.superseded]
    if not wanted:
        raise CheckpointNotFoundError(f"{url} has no complete checkpoint of step {step}", next_step=_near(step, found))
    return run.url_of(wanted[0].name)


def _near(step: int, found: Sequence[ListedCheckpoint]) -> str:
    steps = sorted({each.step for each in found}, key=lambda other: (abs(other - step), other))[:3]
    return f"the nearest are of step {', '.join(map(str, sorted(steps)))}; 'millrace checkpoints ls' shows all"


# --- numbers and tables ---------------------------------------------------------------------------------


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, everything: bool, right: Sequence[str] = ()
) -> None:
    """Print a table (`table`), of many rows only the first ones."""
    first, more = cut(rows, everything=everything)
    for line in table(columns, first, right=right):
        click.echo(line)
    if more:
        click.echo(f"... and {more} more (--all shows them)")


def cut(rows: Sequence[Any], *, everything: bool) -> tuple[Sequence[Any], int]:
    """The rows to show, and the number of the others."""
    # One row more fits into the line that would replace it.
    return (rows, 0) if everything or len(rows) <= _ROWS + 1 else (rows[:_ROWS], len(rows) - _ROWS)


def shape_text(shape: Sequence[int]) -> str:
    """`4096x1024`; a scalar is `()`."""
    return "x".join(map(str, shape)) or "()"


def step_text(step: int, revision: int) -> str:
    """`100`, or `100-r1` for the second save of this step."""
    return f"{step}-r{revision}" if revision else f"{step}"


def ratio_text(stored_bytes: int, raw_bytes: int) -> str:
    """The stored size as a share of the raw size: `0.66`."""
    return f"{stored_bytes / raw_bytes:.2f}" if raw_bytes else "-"


def date_text(seconds: float) -> str:
    """A point in time, local: `2026-11-22 01:32:53`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def iso_text(seconds: float) -> str:
    """The same in UTC for programs: `2026-11-22T01:32:53Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


# --- progress -------------------------------------------------------------------------------------------


class Display(ProgressLine):
    """Shows the progress of a command. `verb` is a participle such as "checked"."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self._last: WorkProgress | None = None
        self._verb = verb
        self._began = time.monotonic()

    def __call__(self, state: WorkProgress) -> None:
        self._last = state
        if self.is_due():
            text = self._text(state, time.monotonic() - self._began)
            self.show(text, state.done_bytes, state.total_bytes)

    def so_far(self) -> str:
        if self._last is None:
            return f"nothing was {self._verb} yet"
        return f"{size_text(self._last.done_bytes)} of {size_text(self._last.total_bytes)} were {self._verb}"

    def _text(self, state: WorkProgress, seconds: float) -> str:
        rate = state.done_bytes / seconds if seconds else 0.0
        left = (state.total_bytes - state.done_bytes) / rate if rate else 0.0
        percent = f"{100 * state.done_bytes // state.total_bytes}%, " if state.total_bytes else ""
        return (
            f"{percent}{size_text(state.done_bytes)} of {size_text(state.total_bytes)} {self._verb}, {size_text(rate)}/s"
            + (f", {time_text(left)} left" if left >= 1 else "")
            + (f", {counted(state.problems, 'problem')}" if state.problems else "")
        )
