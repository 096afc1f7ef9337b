"""Turns the exceptions of fsspec's libraries, which are of any class, into Millrace's."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from millrace.errors import (
    DeniedError,
    IsDirectoryError,
    MillraceError,
    MissingDependencyError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.fsspec_origin.naming import is_public, is_secret

_BUSY = (429, 503)
_DENIED = (401, 403)
_TIMED_OUT = 408
_FTP_NOT_LOGGED_IN = ("530", "532")  # the reply's code, which ftplib gives in front of the text only
# What the same call meets again, however often it is tried.
_WRONG_CALL = frozenset({errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG})
_SHORT = 200
_SECRET_LENGTH = 4


@contextlib.contextmanager
def translated(url: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Raise our errors in place of the library's. `options` are what may not show in them."""
    try:
        yield
    except MillraceError:
        raise
    except Exception as error:  # noqa: BLE001 - libraries raise anything
        ours = translate(error, url, options)
        # Else whoever prints the traceback prints what the library said.
        raise ours from (None if _tells(error, options) else error)


def translate(error: Exception, url: str, options: Mapping[str, Any]) -> MillraceError:
    """Our error for one of a library. What nobody knows is a service that failed."""
    status = _status(error)
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
        return ObjectNotFoundError(f"{url} does not exist", next_step="check the name and 'target_options'")
    if isinstance(error, PermissionError) or status in _DENIED or _is_refused_login(error):
        return DeniedError(f"access to {url} was denied", next_step="check the credentials in 'target_options'")
    if isinstance(error, FileExistsError):
        return ObjectExistsError(f"{url} exists already", next_step="choose another name")
    if isinstance(error, IsADirectoryError):
        return IsDirectoryError(f"{url} is a directory", next_step="name an object in it")
    if isinstance(error, NotImplementedError):
        return UsageError(f"the library behind {url} cannot do this", next_step="copy it to a storage that can")
    if isinstance(error, ImportError):
        return MissingDependencyError(f"{url} needs a library that is not installed", next_step=_shown(error, options))
    if status in _BUSY:
        return OriginBusyError(f"{url} is busy", next_step="ask less often, or later")
    if _is_wrong_call(error, status):
        return UsageError(
            f"{url} was refused ({_shown(error, options)})",
            next_step="check the name and 'target_options'",
        )
    return OriginUnavailableError(
        f"{url} failed ({_shown(error, options)})",
        next_step="check that the storage is reachable from this machine, and 'target_options'",
    )


def _is_wrong_call(error: Exception, status: int | None) -> bool:
    if status is not None:
        return 400 <= status < 500 and status != _TIMED_OUT
    if isinstance(error, OSError):
        return error.errno in _WRONG_CALL
    if _is_refused_by_ftp(error):
        return True
    return isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError)


def _status(error: BaseException) -> int | None:
    """The HTTP status of a failure, under the names by which libraries keep it."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def _is_refused_login(error: BaseException) -> bool:
    paramiko: Any = sys.modules.get("paramiko")
    if paramiko is not None and isinstance(error, paramiko.AuthenticationException):
        return True
    return _is_refused_by_ftp(error) and str(error).startswith(_FTP_NOT_LOGGED_IN)


def _is_refused_by_ftp(error: BaseException) -> bool:
    ftplib: Any = sys.modules.get("ftplib")
    return ftplib is not None and isinstance(error, ftplib.error_perm)


def _shown(error: BaseException, options: Mapping[str, Any]) -> str:
    """A failure's class and the first line of its message; no message where that or a cause repeats what was given."""
    name = type(error).__name__
    if _tells(error, options):
        return f"{name}, whose message is not shown: it repeats 'target_options'"
    return f"{name}: {(str(error).strip().splitlines() or [''])[0][:_SHORT]}"


def _tells(error: BaseException, options: Mapping[str, Any]) -> bool:
    """Whether an exception, or one that led to it, repeats a text that was given as an option, in any form."""
    # In any case of letters: %2f is %2F.
    forms = [form.lower() for value in _texts(options) for form in _forms(value)]
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        said = f"{each} {each.args!r}".lower()
        if any(form in said for form in forms):
            return True
        waiting += [each.__cause__, each.__context__]
    return False


def _forms(text: str) -> set[str]:
    """How a text looks as it is, in a URL, in a form, and in the `repr` of what holds it."""
    url = text.encode("utf-8", "surrogateescape")
    return {text, quote(url), quote(url, safe=""), quote_plus(url), repr(text)[1:-1]}


def _texts(value: Any, name: str = "", secret: bool = False) -> Iterator[str]:
    """The texts in an option's value, as deep as they lie, but for those that the origin's identity shows to everybody."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _texts(each, str(inner), secret or is_secret(str(inner)))
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _texts(each, "", secret)
    elif isinstance(value, bytes | bytearray):
        yield from _texts(value.decode("utf-8", "backslashreplace"), name, secret)
        yield from _texts(repr(bytes(value))[2:-1], name, secret)
    elif isinstance(value, str) and (secret or not is_public(name, value)):
        # Of a key of many lines a library may repeat one.
        yield from (each for each in {value, *value.splitlines()} if len(each) >= _SECRET_LENGTH)
