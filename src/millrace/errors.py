"""Every exception that Millrace raises, in one tree, grouped by the action that the caller can take.

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
    """A key for a log line: printable, and without a query, which may contain a signature that grants access."""
    plain, mark, _ = key.partition("?")
    return printable(f"{plain}?..." if mark else plain)


# A query to the next space, without the punctuation that follows a URL; not a query that is hidden already.
_QUERY = re.compile(r"""(https?://[^\s?]*)\?(?!\.\.\.[)"',:;.]*(?:\s|$))\S*?(?=[)"',:;.]*(?:\s|$))""", re.IGNORECASE)


def without_queries(text: str) -> str:
    """A text whose web addresses have no query, which may contain a signature that grants access to the object."""
    return _QUERY.sub(r"\1?...", text) if "?" in text else text


def _rebuild(cls: type[MillraceError], message: str, next_step: str, fields: dict[str, Any]) -> MillraceError:
    error = cls(message, next_step=next_step)
    error.__dict__.update(fields)
    return error


class MillraceError(Exception):
    """Base of every Millrace error. Read its next step.

    `message` names the thing (object, node, file) and the problem; `next_step` is an action of the user. `str(error)` is one
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
    """The call is not valid. Change it."""

    code = "usage"


class ConfigurationError(UsageError):
    """An option, environment variable or configuration file has an invalid value. Correct it; the error names it."""

    code = "configuration"


class MissingDependencyError(UsageError, ImportError):
    """An optional library is not installed. Install the extra that the error names."""

    code = "missing-dependency"


class UnsupportedObjectError(UsageError):
    """A value of a state dict cannot be stored safely. Remove the named key, or make its value a tensor."""

    code = "unsupported-object"


class UnsupportedFormatError(UsageError):
    """A newer or foreign program wrote it; it is left unchanged. Use the newer version, or another location."""

    code = "unsupported-format"


class StateMismatchError(UsageError):
    """Values of a state dict have another shape or kind in the checkpoint. Build it as it was saved; `keys` names them."""

    code = "state-mismatch"
    keys: tuple[str, ...] = ()


class MissingKeyError(StateMismatchError, KeyError):
    """The checkpoint lacks `keys` of a state dict. Use the names of the save, or pass `allow_partial_load=True`."""

    code = "missing-key"


class IsDirectoryError(UsageError, IsADirectoryError):
    """The call needs one object, and the path is a directory. Pass `recursive=True`, or name the object."""

    code = "is-directory"
    _errno = errno.EISDIR


class NotDirectoryError(UsageError, NotADirectoryError):
    """The path is an object where a directory is needed, or ends in a slash.

    Name the object without the slash, or its directory.
    """

    code = "not-directory"
    _errno = errno.ENOTDIR


# --- the thing is not there -----------------------------------------------------------------------


class MissingError(MillraceError, FileNotFoundError):
    """The named object, prefix or checkpoint does not exist. Check the name."""

    code = "missing"
    _errno = errno.ENOENT


class ObjectNotFoundError(MissingError):
    """The origin has no such object, prefix or bucket. Check bucket, key and endpoint."""

    code = "object-not-found"


class CheckpointNotFoundError(MissingError):
    """There is no complete checkpoint; unfinished saves do not count. Use an earlier one."""

    code = "checkpoint-not-found"


# --- not allowed ----------------------------------------------------------------------------------


class DeniedError(MillraceError, PermissionError):
    """The credentials are missing, wrong or insufficient. Correct them, or the policy of the bucket."""

    code = "denied"
    _errno = errno.EACCES


# --- it was changed meanwhile ---------------------------------------------------------------------


class ChangedError(MillraceError, OSError):
    """Another program has changed the object or file since this operation began. Open it again."""

    code = "changed"
    _errno = errno.ESTALE


class ObjectChangedError(ChangedError):
    """The object was overwritten after it was opened. Open it again; a read never mixes two versions."""

    code = "object-changed"


class ObjectExistsError(ChangedError, FileExistsError):
    """A write that must create a new object found an existing one. Choose another name, or remove the old one."""

    code = "object-exists"
    _errno = errno.EEXIST


class BaseGoneError(ChangedError):
    """Files of an earlier checkpoint that the new one refers to are missing; nothing was published. Save without a base."""

    code = "base-gone"


class RunTakenError(ChangedError):
    """Another process saves into this run, or the claim of this one was removed. End one of them, or use another run.

    Only one process may save into a run. Open the run again afterwards.
    """

    code = "run-taken"


# --- try again later ------------------------------------------------------------------------------


class RetryableError(MillraceError, OSError):
    """A service failed, and the retries are used up. Try again later."""

    code = "retryable"


class OriginUnavailableError(RetryableError):
    """The origin cannot be reached, or keeps failing. Check network and endpoint, and try again.

    `is_final`: the origin rejected the request (a 400, a 501), so it was not repeated. `brief_seconds`: set when the cause
    is known and a longer wait rarely helps: the time for which the request is repeated, unless the origin has responded
    recently (0 for an unknown host, a little for a refused connection). `most_tries`: the most attempts.
    """

    code = "origin-unavailable"
    is_final: bool = False
    brief_seconds: float | None = None
    most_tries: int | None = None


class OriginBusyError(OriginUnavailableError):
    """The origin requests a lower rate (429, 503). Try again later, or lower `request_rate` and `max_requests`.

    `retry_after` is the pause in seconds that it requested, or None.
    """

    code = "origin-busy"

    def __init__(self, message: str, *, next_step: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, next_step=next_step)
        self.retry_after = retry_after


class OutcomeUnknownError(RetryableError):
    """The response to a request was lost. Check the state, then repeat the request if it had no effect."""

    code = "outcome-unknown"


class SaverDiedError(RetryableError):
    """The process that carries out asynchronous saves ended during a save. Save again, which starts another one.

    stderr and the kernel's log have the cause.
    """

    code = "saver-died"


class PeerError(RetryableError):
    """Another node failed a request. Repeat the command later; reads continue without the node and do not raise this."""

    code = "peer"


class PeerSilentError(PeerError):
    """A node cannot be reached, closed the connection, or was silent for too long. Check the node and the network."""

    code = "peer-silent"


class PeerRefusedError(PeerError):
    """A node refused a request. Follow the message: often the token or a version is wrong.

    `status` is an HTTP status, 0 when the node supports no common protocol version.

    `reason` is the `code` of its error, if any; `has_lease` is True when it requests the blocks that it cannot fetch.
    """

    code = "peer-refused"
    reason = ""
    has_lease = False

    def __init__(self, message: str, *, next_step: str = "", status: int = 0) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status


class WireError(PeerError):
    """A message violates the protocol of the data plane. Check the program at the node's address, and the nodes' versions.

    `status` is the status with which a server responds.
    """

    code = "wire"

    def __init__(self, message: str, *, next_step: str = "", status: int = 400) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status


# --- the local disk -------------------------------------------------------------------------------


class StorageError(MillraceError, OSError):
    """A local disk or file, or host memory for a save, cannot be used. Check disk, permissions and limits of memory."""

    code = "storage"


class DiskFullError(StorageError):
    """A local disk has no space left. Free some, or lower `capacity`."""

    code = "disk-full"
    _errno = errno.ENOSPC


# --- wrong bytes ----------------------------------------------------------------------------------


class DamagedError(MillraceError, OSError):
    """Bytes do not match their checksum, and no intact copy is left. Restore the data from another source."""

    code = "damaged"


class CorruptCheckpointError(DamagedError):
    """A checkpoint differs from the one that was written. Use an earlier one."""

    code = "corrupt-checkpoint"
