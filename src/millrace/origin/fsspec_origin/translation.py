"""Translates the exceptions and descriptions of fsspec's libraries, which use any class and name, into Millrace's. Pure."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
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
from millrace.origin.obstore_library import is_panic
from millrace.origin.options.public import is_public, is_secret
from millrace.origin.protocol import ObjectInfo
from millrace.origin.reachability import cause_of

# The libraries' names for values that change with the bytes, the most exact first.
_CONTENT = (
    "etag", "ETag", "e_tag", "version_id", "VersionId", "versionId", "generation", "checksum", "md5", "md5Hash",
    "md5Checksum", "content_md5", "content_hash", "sha256", "sha1", "sha", "hash", "rev", "CRC",
)  # fmt: skip
# The names for the time of the last write; not "time", which can be the last read.
_MODIFIED = (
    "mtime", "modified", "last_modified", "LastModified", "modificationTime", "modify", "updated", "modifiedTime",
    "server_modified", "created", "creation_time", "date_time",
)  # fmt: skip
_PLACES = ("ino", "fileId")
_BUSY = (429, 503)
_DENIED = (401, 403)
_TIMED_OUT = 408
_FTP_NOT_LOGGED_IN = ("530", "532")  # the reply's code, which ftplib has in front of the text only
# A retry would get the same error.
_WRONG_CALL = frozenset({errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG})
_SHORT = 200
_SECRET_LENGTH = 4


@contextlib.contextmanager
def translated(url: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Replace the library's errors by Millrace's. The values of `options` must not appear in them."""
    try:
        yield
    except MillraceError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        ours = translate(error, url, options)
        # The traceback of the cause would contain the library's message.
        raise ours from (None if _shows_option(error, options) else error)


def translate(error: BaseException, url: str, options: Mapping[str, Any]) -> MillraceError:
    """Our error for one of a library. An unknown error counts as a failed service."""
    status, kind = _status(error), kind_of(error)
    if issubclass(kind, FileNotFoundError | NotADirectoryError) or status in (404, 410):
        return ObjectNotFoundError(f"{url} does not exist", next_step="check the name and 'target_options'")
    if issubclass(kind, PermissionError) or status in _DENIED or _is_refused_login(error):
        return DeniedError(f"access to {url} was denied", next_step="check the credentials in 'target_options'")
    if issubclass(kind, FileExistsError):
        return ObjectExistsError(f"{url} exists already", next_step="choose another name")
    if issubclass(kind, IsADirectoryError):
        return IsDirectoryError(f"{url} is a directory", next_step="name an object in it")
    if isinstance(error, NotImplementedError):
        return UsageError(f"the library behind {url} cannot do this", next_step="copy it to a storage that can")
    if isinstance(error, ImportError):
        return MissingDependencyError(f"{url} needs a library that is not installed", next_step=_shown(error, options))
    if status in _BUSY:
        return OriginBusyError(f"{url} is busy", next_step="send fewer requests, or try later")
    if _is_wrong_call(error, status):
        return UsageError(
            f"{url} was refused ({_shown(error, options)})",
            next_step="check the name and 'target_options'",
        )
    failed = OriginUnavailableError(
        f"{url} failed ({_shown(error, options)})",
        next_step="check that the storage is reachable from this machine, and 'target_options'",
    )
    cause = cause_of(error)
    failed.brief_seconds = cause.seconds if cause is not None else None
    failed.is_final = is_panic(error)
    return failed


def kind_of(error: BaseException) -> type[BaseException]:
    """The class of an error. For an `OSError` of smb, which has a class of its own, Python's class for its number.

    Not for those of other libraries: a connection that a firewall refuses is not a denied access to an object.
    """
    if not isinstance(error, OSError) or not type(error).__module__.startswith("smbprotocol"):
        return type(error)
    builtin = type(OSError(error.errno, "")) if error.errno else OSError
    return type(error) if builtin is OSError else builtin


def _is_wrong_call(error: BaseException, status: int | None) -> bool:
    if status is not None:
        return 400 <= status < 500 and status != _TIMED_OUT
    if isinstance(error, OSError):
        return error.errno in _WRONG_CALL
    if _is_refused_by_ftp(error):
        return True
    return isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError)


def _status(error: BaseException) -> int | None:
    """The HTTP status of a failure, by the names of several libraries."""
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
    """The class of a failure and the first line of its message; no message if it or a cause repeats an option."""
    name = type(error).__name__
    if _shows_option(error, options):
        return f"{name}, whose message is not shown: it repeats 'target_options'"
    return f"{name}: {(str(error).strip().splitlines() or [''])[0][:_SHORT]}"


def _shows_option(error: BaseException, options: Mapping[str, Any]) -> bool:
    """Whether an exception or one of its causes repeats the text of an option, in any form."""
    # In any case of letters: %2f is %2F.
    forms = [form.lower() for value in _texts(options) for form in _forms(value)]
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        text = f"{each} {each.args!r}".lower()
        if any(form in text for form in forms):
            return True
        waiting += [each.__cause__, each.__context__]
    return False


def _forms(text: str) -> set[str]:
    """A text as it is, in a URL, in a form, and in a `repr`."""
    url = text.encode("utf-8", "surrogateescape")
    return {text, quote(url), quote(url, safe=""), quote_plus(url), repr(text)[1:-1]}


def _texts(value: Any, name: str = "", secret: bool = False) -> Iterator[str]:
    """The texts in an option's value, at any depth, except for those in the origin's identity."""
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
        # A library may repeat one line of a key with several.
        yield from (each for each in {value, *value.splitlines()} if len(each) >= _SECRET_LENGTH)


# --- descriptions ---------------------------------------------------------------------------------


def is_directory(info: Mapping[str, Any]) -> bool:
    """Whether an entry is a directory."""
    return str(info.get("type")).lower() == "directory"


def describe(key: str, info: Mapping[str, Any], url: str) -> ObjectInfo:
    """The description of a file from the library's `info`. Raises `UsageError` if it has no size."""
    size = info.get("size")
    if size is None:
        raise UsageError(f"{url} has no known size", next_step="copy it to another storage")
    found = [(name, info[name]) for name in _MODIFIED if info.get(name) is not None]
    modified = seconds(found[0][1]) if found else 0.0
    return ObjectInfo(key=key, size=int(size), version=_version(info, int(size), modified), modified=modified)


def _version(info: Mapping[str, Any], size: int, modified: float) -> str:
    for name in _CONTENT:
        value = info.get(name)
        if value not in (None, ""):
            return f"{name}={value}"
    places = "".join(f"-{info[name]}" for name in _PLACES if info.get(name) is not None)
    return f"~{size}-{modified!r}{places}"


def seconds(value: Any) -> float:
    """A library's time in Unix seconds; 0.0 for an invalid one. Times without a zone are UTC."""
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, int | float):
        return value / 1000 if value > 1e11 else float(value)  # hdfs counts milliseconds
    if isinstance(value, tuple) and len(value) == 6:  # members of a zip file
        return seconds(datetime(*value))
    if isinstance(value, str):
        for read in (datetime.fromisoformat, lambda text: datetime.strptime(text, "%Y%m%d%H%M%S")):
            try:
                return seconds(read(value))
            except ValueError:
                continue
    return 0.0
