"""Every exception that Millrace raises, in one tree, grouped by what the caller can do about it.

========================  ==========================================================
`UsageError`              Change the call or the configuration.
`MissingError`            The thing named does not exist; check the name.
`DeniedError`             Credentials are missing, wrong or insufficient.
`ChangedError`            The thing was changed meanwhile; open it again.
`RetryableError`          A service is down or slow; the same call may succeed later.
`StorageError`            A local disk is full, read-only or failing; free or replace it.
`DamagedError`            Bytes are wrong and nothing intact is left to read instead.
========================  ==========================================================

All of them are picklable (they cross Ray processes), carry a stable `code`, and are also the builtin
exception (`FileNotFoundError`, `PermissionError`, `OSError`, `ValueError`) that code written against
fsspec or pyarrow expects. A dependency's own exception never leaves Millrace: it is the `__cause__`.
"""

from __future__ import annotations

import errno
import re
from typing import Any, ClassVar


def printable(text: str) -> str:
    """A text whose control characters are escaped. Names of objects may contain commands for a terminal or a log."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def shown_key(key: str) -> str:
    """A key for a log line: printable, and without a query, which may contain a signature that gives access."""
    plain, mark, _ = key.partition("?")
    return printable(f"{plain}?..." if mark else plain)


# A query to the next space, without the punctuation that follows a URL; not a query that is hidden already.
_QUERY = re.compile(r"""(https?://[^\s?]*)\?(?!\.\.\.[)"',:;.]*(?:\s|$))\S*?(?=[)"',:;.]*(?:\s|$))""", re.IGNORECASE)


def without_queries(text: str) -> str:
    """A text whose web addresses have no query, which may contain a signature that gives access to the object."""
    return _QUERY.sub(r"\1?...", text) if "?" in text else text


def _rebuild(cls: type[MillraceError], message: str, next_step: str, fields: dict[str, Any]) -> MillraceError:
    error = cls(message, next_step=next_step)
    error.__dict__.update(fields)
    return error


class MillraceError(Exception):
    """Base of every Millrace error.

    `message` names the thing (object, node, file) and the problem; `next_step` is what the user can do. `str(error)` is one
    line. Neither shows the query of a web address.
    """

    code: ClassVar[str] = "error"
    _errno: ClassVar[int] = errno.EIO

    def __init__(self, message: str, *, next_step: str = "") -> None:
        message = without_queries(message)
        super().__init__(message)
        self.message = message
        self.next_step = without_queries(next_step)
        if issubclass(type(self), OSError):
            as_os_error: Any = self
            as_os_error.errno, as_os_error.strerror = self._errno, message

    def __str__(self) -> str:
        text = f"{self.message}: {self.next_step}" if self.next_step else self.message
        return printable(" ".join(text.split()))

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: value for name, value in self.__dict__.items() if name not in ("message", "next_step")}
        return _rebuild, (type(self), self.message, self.next_step, fields)


# --- change the call or the configuration ---------------------------------------------------------


class UsageError(MillraceError, ValueError):
    """The call cannot work as it stands."""

    code = "usage"


class ConfigurationError(UsageError):
    """An option, environment variable or configuration file has a value that cannot be used."""

    code = "configuration"


class MissingDependencyError(UsageError, ImportError):
    """An optional library is needed for this call; the next step names the extra to install."""

    code = "missing-dependency"


class UnsupportedObjectError(UsageError):
    """A value cannot be stored safely; the message names its key."""

    code = "unsupported-object"


class UnsupportedFormatError(UsageError):
    """A directory or file was written by a newer or a foreign program; it is left untouched."""

    code = "unsupported-format"


class StateMismatchError(UsageError):
    """A state dict to load into does not fit the checkpoint. `keys` names every value that does not."""

    code = "state-mismatch"
    keys: tuple[str, ...] = ()


class MissingKeyError(StateMismatchError, KeyError):
    """A state dict to load into has keys that the checkpoint lacks. `keys` names all of them."""

    code = "missing-key"


class IsDirectoryError(UsageError, IsADirectoryError):
    """The call is for one object, and this is a directory."""

    code = "is-directory"
    _errno = errno.EISDIR


class NotDirectoryError(UsageError, NotADirectoryError):
    """The call is for a directory, and this is an object."""

    code = "not-directory"
    _errno = errno.ENOTDIR


# --- the thing is not there -----------------------------------------------------------------------


class MissingError(MillraceError, FileNotFoundError):
    """The object, prefix or checkpoint does not exist."""

    code = "missing"
    _errno = errno.ENOENT


class ObjectNotFoundError(MissingError):
    """The origin has no object of this name."""

    code = "object-not-found"


class CheckpointNotFoundError(MissingError):
    """There is no complete checkpoint at this location."""

    code = "checkpoint-not-found"


# --- not allowed ----------------------------------------------------------------------------------


class DeniedError(MillraceError, PermissionError):
    """The origin refused the credentials, or they do not suffice."""

    code = "denied"
    _errno = errno.EACCES


# --- it was changed meanwhile ---------------------------------------------------------------------


class ChangedError(MillraceError, OSError):
    """The thing has changed since this operation began."""

    code = "changed"
    _errno = errno.ESTALE


class ObjectChangedError(ChangedError):
    """The object was overwritten after it was opened; a read would mix two versions."""

    code = "object-changed"


class ObjectExistsError(ChangedError, FileExistsError):
    """A conditional write found that the object already exists."""

    code = "object-exists"
    _errno = errno.EEXIST


class BaseGoneError(ChangedError):
    """Files of an earlier checkpoint, which the one being saved builds on, are gone; nothing was published."""

    code = "base-gone"


class RunTakenError(ChangedError):
    """Another process saves into this run of checkpoints, and only one may; or the claim of this process was removed."""

    code = "run-taken"


# --- try again later ------------------------------------------------------------------------------


class RetryableError(MillraceError, OSError):
    """A service failed. The retries inside Millrace are used up."""

    code = "retryable"


class OriginUnavailableError(RetryableError):
    """The origin cannot be reached, or keeps failing.

    `is_final`: the origin rejected the request (a 400, a 501), so it was not repeated. `brief_seconds`: set when the cause
    is known and a longer wait rarely helps: the time for which the request is repeated, unless the origin has responded
    recently (0 for an unknown host, a little for a refused connection). `most_tries`: the most attempts.
    """

    code = "origin-unavailable"
    is_final: bool = False
    brief_seconds: float | None = None
    most_tries: int | None = None


class OriginBusyError(OriginUnavailableError):
    """The origin requests a lower rate (429, 503 SlowDown and the like).

    `retry_after` is the pause in seconds that it requested, or None.
    """

    code = "origin-busy"

    def __init__(self, message: str, *, next_step: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.retry_after = retry_after


class OutcomeUnknownError(RetryableError):
    """A request was sent and not acknowledged, and its outcome cannot be determined now."""

    code = "outcome-unknown"


class SaverDiedError(RetryableError):
    """The process that carries out asynchronous saves has ended during a save. The next save starts another one."""

    code = "saver-died"


class PeerError(RetryableError):
    """Another node of the cluster failed a request. Reads continue without it, and do not raise this."""

    code = "peer"


class PeerSilentError(PeerError):
    """A node cannot be reached, closed the connection, or was silent for too long."""

    code = "peer-silent"


class PeerRefusedError(PeerError):
    """A node refused a request. `status` is an HTTP status, 0 when the node supports no common protocol version.

    `reason` is the `code` of its error, if any; `has_lease` is True when it requests the blocks that it cannot fetch.
    """

    code = "peer-refused"
    reason = ""
    has_lease = False

    def __init__(self, message: str, *, next_step: str = "", status: int = 0) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status


class WireError(PeerError):
    """A message violates the protocol of the data plane. `status` is the status with which a server responds."""

    code = "wire"

    def __init__(self, message: str, *, next_step: str = "", status: int = 400) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status


# --- the local disk -------------------------------------------------------------------------------


class StorageError(MillraceError, OSError):
    """A local disk cannot be written or read."""

    code = "storage"


class DiskFullError(StorageError):
    """A local disk has no space left."""

    code = "disk-full"
    _errno = errno.ENOSPC


# --- wrong bytes ----------------------------------------------------------------------------------


class DamagedError(MillraceError, OSError):
    """Stored bytes do not match their checksum and no intact copy is left."""

    code = "damaged"


class CorruptCheckpointError(DamagedError):
    """A checkpoint's manifest or data differs from the written bytes."""

    code = "corrupt-checkpoint"
