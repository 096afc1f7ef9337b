"""Checks of arguments: each function returns the value, or raises `ConfigurationError` with the name of the argument."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from millrace.config import shown
from millrace.errors import ConfigurationError

ReadThroughMode = Literal["auto", "cluster", "none"]
"""Whether checkpoint files are read through the cache of a cluster: if there is one, in any case, or never."""


def read_through_mode(value: Any) -> ReadThroughMode:
    """The option `read_through`."""
    if not isinstance(value, str) or value not in get_args(ReadThroughMode):
        raise _wrong("read_through", value, "give 'auto', 'cluster' or 'none'")
    return cast(ReadThroughMode, value)


def path_text(name: str, value: Any) -> str:
    """A URL or path as text."""
    text = value.__fspath__() if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise _wrong(name, value, "give a directory or scheme://bucket/path, as text or a pathlib.Path")
    return text


def whole_number(name: str, value: Any, *, least: int) -> int:
    """An integer of Python or numpy, at least `least`. A bool is not accepted."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise _wrong(name, value, f"give a whole number from {least} up")
    return number


def thread_number(name: str, value: Any) -> int | None:
    """A number of threads, or None."""
    return None if value is None else whole_number(name, value, least=1)


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise _wrong(name, value, "give True or False")
    return bool(value)


def real_number(name: str, value: Any, *, least: float) -> float:
    """A number, at least `least`, not NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise _wrong(name, value, f"give a number from {least:g} up")
    return float(value)


def mapping(name: str, value: Any) -> dict[str, Any] | None:
    """A dict, or None."""
    if value is not None and not isinstance(value, Mapping):
        raise _wrong(name, value, "give a dict")
    return None if value is None else dict(value)


def classes(name: str, value: Any) -> tuple[type, ...]:
    """Classes in a list or another collection."""
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else (None,)
    if not all(isinstance(each, type) for each in found):
        raise _wrong(name, value, "give a list of classes, such as [MyClass]")
    return found


def function(name: str, value: Any) -> Any:
    """A callable, or None."""
    if value is not None and not callable(value):
        raise _wrong(name, value, "give a function")
    return value


def patterns(name: str, value: Any) -> list[str] | None:
    """One or more patterns, or None."""
    found = [value] if isinstance(value, str) else value
    if found is None:
        return None
    if isinstance(found, bytes | Mapping) or not isinstance(found, Iterable):
        raise _wrong(name, value, "give a pattern such as 'model.*', or a list of them")
    listed = list(found)
    if not listed or not all(isinstance(each, str) and each for each in listed):
        raise _wrong(name, value, "give a pattern such as 'model.*', or a list of them; None selects everything")
    return listed


def sequence(name: str, value: Any, what: str) -> Sequence[Any]:
    """A list or tuple."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _wrong(name, value, f"give a list of {what}")
    return value


def _wrong(name: str, value: Any, next_step: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={shown(value)}", next_step=next_step)
