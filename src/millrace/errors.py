"""Every exception that Millrace raises, in one tree, grouped by what the caller can do about it.

========================  ==========================================================
`UsageError`              Change the call or the configuration.
`MissingError`            The thing named does not exist; check the name.
`DeniedError`             Credentials are missing, wrong or insufficient.
`ChangedError`            Somebody else changed the thing; open it again.
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
    """A text in which what a terminal or a log would take for a command is a number: others choose the names of objects."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


# A query to the next space, less what a message puts behind a URL; not one that is hidden already.
_QUERY = re.compile(r"""(https?://[^\s?]*)\?(?!\.\.\.[)"',:;.]*(?:\s|$))\S*?(?=[)"',:;.]*(?:\s|$))""", re.IGNORECASE)


def without_queries(text: str) -> str:
    """A text in which web addresses have no query: it may hold a signature, which opens the object to whoever reads it."""
    return _QUERY.sub(r"\1?...", text) if "?" in text else text


def _rebuild(cls: type[MillraceError], message: str, next_step: str, fields: dict[str, Any]) -> MillraceError:
    error = cls(message, next_step=next_step)
    error.__dict__.update(fields)
    return error


class MillraceError(Exception):
    """Base of every Millrace error.

    `message` names the thing (object, node, file); `next_step` says what to do. `str(error)` is one line.
    Neither shows the query of a web address.
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
    """No complete checkpoint lies at this place."""

    code = "checkpoint-not-found"


# --- not allowed ----------------------------------------------------------------------------------


class DeniedError(MillraceError, PermissionError):
    """The origin refused the credentials, or they do not suffice."""

    code = "denied"
    _errno = errno.EACCES


# --- somebody else changed it ---------------------------------------------------------------------


class ChangedError(MillraceError, OSError):
    """The thing is no longer what it was when this operation began."""

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
    """Another process saves into this run of checkpoints, and only one may."""

    code = "run-taken"


# --- try again later ------------------------------------------------------------------------------


class RetryableError(MillraceError, OSError):
    """A service did not answer as it should; retries inside Millrace are already used up."""

    code = "retryable"


class OriginUnavailableError(RetryableError):
    """The origin cannot be reached, or keeps failing.

    `is_final`: its answer says that it will not do this (a 400, a 501), and was not asked for again.
    """

    code = "origin-unavailable"
    is_final: bool = False


class OriginBusyError(OriginUnavailableError):
    """The origin asks for fewer requests (429, 503 SlowDown and the like).

    `retry_after` is the pause in seconds that it asked for, None where it did not say.
    """

    code = "origin-busy"

    def __init__(self, message: str, *, next_step: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.retry_after = retry_after


class OutcomeUnknownError(RetryableError):
    """Something was sent and not acknowledged, and what became of it cannot be found out now."""

    code = "outcome-unknown"


class PeerError(RetryableError):
    """Another node of the cluster did not give what was asked of it. Reads go on without it, and do not raise this."""

    code = "peer"


class PeerSilentError(PeerError):
    """A node cannot be reached, broke the connection off, or was silent for too long."""

    code = "peer-silent"


class PeerRefusedError(PeerError):
    """A node said no. `status` is that of its answer in HTTP's numbers, 0 where it speaks no version that is known here.

    `reason` is the `code` of the error that it had, if any; `has_lease` that it asks for the blocks it cannot fetch.
    """

    code = "peer-refused"
    reason = ""
    has_lease = False

    def __init__(self, message: str, *, next_step: str = "", status: int = 0) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status


class WireError(PeerError):
    """What came over the wire is not what the protocol of the data plane allows. `status` is what a server answers to it."""

    code = "wire"

    def __init__(self, message: str, *, next_step: str = "", status: int = 400) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status


# --- the local disk -------------------------------------------------------------------------------


class StorageError(MillraceError, OSError):
    """A local disk cannot be written or read."""

    code = "storage"


class DiskFullError(StorageError):
    """A local disk has no room left."""

    code = "disk-full"
    _errno = errno.ENOSPC


# --- wrong bytes ----------------------------------------------------------------------------------


class DamagedError(MillraceError, OSError):
    """Stored bytes do not match their checksum and no intact copy is left."""

    code = "damaged"


class CorruptCheckpointError(DamagedError):
    """A checkpoint's manifest or data is not what was written."""

    code = "corrupt-checkpoint"
