"""Translates obstore's exceptions into Millrace's.

obstore has classes for a few kinds of errors. All others are one general error with the server's response in its text, from
which status and code are parsed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from urllib.parse import unquote

from millrace.errors import (
    DeniedError,
    DiskFullError,
    MillraceError,
    NotDirectoryError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
)
from millrace.origin.keys import bucket_word
from millrace.origin.obstore_library import obstore_library
from millrace.origin.reachability import Cause

# The error code of S3, GCS and Azure, in the body of a response.
_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")
# One object of a request that removes several; the status of the response is 200.
_NOT_REMOVED = re.compile(r'DeleteFailed \{\s*path: "(.*)",\s*code: "([A-Za-z]+)"')
_STATUS = re.compile(r"status code: (\d{3})\b|\bstatus: (\d{3})\b")
# The address of the failed request, which obstore hides if it contains a token.
_ASKED = re.compile(r"Error performing [A-Z]+ (\S+) in ")
# Unexpected content of a response.
_HELD = re.compile(r'\bstring ".*?"(?=, expected)')

# The failures of obstore's HTTP client.
_KIND = re.compile(r"\bkind: (\w+)")
_KINDS = {
    "BrokenPipe": "the server closed the connection",
    "ConnectionAborted": "the connection was aborted",
    "ConnectionReset": "the connection was reset",
    "Timeout": "no response in time",
    "UnexpectedEof": "the response ended early",
}

_NO_TOKEN_FILE = (
    "the token file of this machine's identity cannot be read",
    "check the file that a variable such as AWS_WEB_IDENTITY_TOKEN_FILE names, and its permissions",
)
_NO_RANGES = "Received non-partial response when range requested"
# Permanent failures without a status: words of obstore's text, the problem, the next step.
_PERMANENT = {
    "error following redirect": ("its server redirects in a circle", "check the endpoint and the region"),
    _NO_RANGES: (
        "its server ignores the range of a request",
        "check that the endpoint is an object store, not a web page or a proxy",
    ),
    "Received redirect without LOCATION": ("the bucket is in another region", "set the region of the bucket"),
    "Failed to read token file": _NO_TOKEN_FILE,
    "Failed to read EKS token file": _NO_TOKEN_FILE,
    "Error reading federated token file": _NO_TOKEN_FILE,
}

_NO_BUCKET = frozenset(
    {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "InvalidBucketName", "InvalidResourceName"}
)
# Responses to the last request of an upload in parts, when the same request has succeeded before and its response was lost.
_NO_UPLOAD = frozenset({"NoSuchUpload", "InvalidBlockList"})

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Error codes that obstore does not always distinguish from other failures.
_REFUSALS = frozenset(
    {
        "AccessDenied",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "AuthorizationPermissionMismatch",
        "InvalidAccessKeyId",
        "InvalidToken",
        "KeyBasedAuthenticationNotPermitted",
        "NoAuthenticationInformation",
        "PublicAccessNotPermitted",
        "SignatureDoesNotMatch",
    }
)
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})
_EXPIRED = frozenset({"ExpiredToken", "RequestExpired", "TokenRefreshRequired"})
_BUSY = frozenset({429, 503})
_SLOW_DOWN = "SlowDown"  # also in a response with the status 200


def server_code(error: BaseException) -> str | None:
    """The error code in the server's response (`NoSuchBucket`, ...), if any."""
    if match := _NOT_REMOVED.search(str(error)):
        return match[2]
    match = _CODE.search(str(error))
    return match[1] if match else None


def is_outside(error: BaseException) -> bool:
    """Whether a range starts behind the object's end, according to the server or to obstore."""
    return server_code(error) == "InvalidRange" or "InvalidRangeRequest" in str(error)


def http_status(error: BaseException) -> int | None:
    """The status of the server's response; None without a response."""
    match = _STATUS.search(str(error))
    return int(match[1] or match[2]) if match else None


def is_credentials_request(error: BaseException, url: str) -> bool:
    """Whether the failed request was for the identity of this machine or pod, and not for the object `url`.

    The address of such a request does not contain the bucket. (If it does by chance, the error counts as another one.)
    """
    match = _ASKED.search(str(error))
    scheme, _, key = url.partition("://")
    if match is None:
        return False
    if match[1] == "REDACTED":
        return scheme == "s3"  # only requests to STS; for Azure, every request with a signature in its address
    return key.partition("/")[0] not in unquote(match[1])


def translate(
    error: Exception,
    url: str,
    identity: str,
    credentials_error: MillraceError | None = None,
    diagnose: Callable[[], Cause | None] = lambda: None,
) -> MillraceError | None:
    """The Millrace error for one of obstore's; None for a bug in Millrace.

    `credentials_error` is the error of the last request for credentials, if any; obstore only returns its text. `diagnose`
    returns the cause for a request without a response.
    """
    library = obstore_library().exceptions
    if credentials_error is not None and isinstance(error, library.BaseError) and http_status(error) is None:
        return type(credentials_error)(credentials_error.message, next_step=credentials_error.next_step)
    if isinstance(error, library.BaseError | OSError) and is_credentials_request(error, url):
        return _no_credentials(http_status(error), url)
    code = server_code(error)
    if match := _NOT_REMOVED.search(str(error)):
        url = f"{'/'.join(url.split('/', 3)[:3])}/{match[1]}"
    if code in _NO_BUCKET:
        bucket = "/".join(url.split("/", 3)[:3])
        return ObjectNotFoundError(
            f"the {bucket_word(url.partition(':')[0])} of {url} does not exist",
            next_step=f"check {bucket} and the endpoint",
        )
    if code in _NO_UPLOAD:
        failed = OriginUnavailableError(
            f"{url}: {identity} no longer has its upload: it was published and the response was lost, or it was aborted",
            next_step="read the object to see which, or write it again",
        )
        failed.is_final = True
        return failed
    if isinstance(error, FileNotFoundError):
        scheme = url.partition(":")[0]
        check = "name" if scheme == "file" else f"{bucket_word(scheme)}, the name and the endpoint"
        return ObjectNotFoundError(f"{url} does not exist", next_step=f"check the {check}")
    if isinstance(error, library.PreconditionError):
        return ObjectChangedError(f"{url} was overwritten while it was read", next_step="open it again")
    if isinstance(error, library.AlreadyExistsError):
        return ObjectExistsError(f"{url} exists already", next_step="choose another name")
    if code in _EXPIRED:
        return DeniedError(
            f"the credentials for {url} have expired",
            next_step="give new ones, or a profile or an identity, which are renewed automatically",
        )
    if code in _SKEWED:
        return DeniedError(
            f"access to {url} was denied because the clock of this machine is wrong",
            next_step="set the clock, or start the time service (NTP)",
        )
    if http_status(error) == 400 and code is None:
        # S3's response to a HEAD with expired credentials, which has no body for the reason.
        return DeniedError(
            f"{url}: the origin refuses the request (status 400), without a reason",
            next_step="check that the credentials have not expired, and the name",
        )
    if url.startswith("file:") and (local := _of_local_file(error, url)) is not None:
        return local
    refused = isinstance(error, library.PermissionDeniedError | library.UnauthenticatedError | PermissionError)
    if refused or code in _REFUSALS or http_status(error) in (401, 403):
        return DeniedError(
            f"access to {url} was denied",
            next_step="check the credentials and their rights on this " + bucket_word(url.partition(":")[0]),
        )
    if isinstance(error, library.InvalidPathError):
        return ObjectNotFoundError(f"{url} is not a valid object name", next_step="check the name")
    if http_status(error) in _BUSY or code == _SLOW_DOWN:
        reason = code if code == _SLOW_DOWN else f"status {http_status(error)}"
        return OriginBusyError(
            f"{url}: {identity} requests a lower rate ({reason})",
            next_step="try again later, or with fewer workers",
        )
    if isinstance(error, library.BaseError):
        for words, (problem, next_step) in _PERMANENT.items():
            if words in str(error):
                failed = OriginUnavailableError(f"{url}: {identity} failed: {problem}", next_step=next_step)
                # Retried: a proxy may ignore the range of one request, but a server without ranges ignores every one.
                failed.is_final = words != _NO_RANGES
                failed.most_tries = 3
                return failed
    if isinstance(error, library.BaseError | OSError | ValueError):
        cause = diagnose() if http_status(error) is None else None
        if cause is not None:
            return cause.error(f"{url}: {identity} cannot be reached")
        failed = OriginUnavailableError(
            f"{url}: {identity} failed ({_first_line(error)})",
            next_step="check that the endpoint is up and reachable from this machine",
        )
        failed.is_final = _is_final(http_status(error))
        return failed
    return None


def _of_local_file(error: Exception, url: str) -> MillraceError | None:
    """The Millrace error for an error of the kernel, or for a name that obstore reserves; None for any other."""
    text = str(error)
    if any(f"(os error {number})" in text for number in _DENIED):
        return DeniedError(
            f"access to {url} was denied", next_step="check the owner, the mode and the mount of its directory"
        )
    if any(f"(os error {number})" in text for number in _FULL):
        return DiskFullError(
            f"{url}: no space left on the disk", next_step="free disk space, or raise the quota or limit"
        )
    if "Filenames containing trailing" in text:
        return ObjectNotFoundError(
            f"{url} is not a valid object name", next_step="rename it: '#' and a number mark unfinished writes"
        )
    if f"(os error {errno.ENAMETOOLONG})" in text:
        return ObjectNotFoundError(
            f"{url} is not a valid object name",
            next_step="use a shorter one: an unfinished write adds characters to it",
        )
    if f"(os error {errno.ENOTDIR})" in text:
        return NotDirectoryError(f"{url} is below a file, not a directory", next_step="check the name")
    if f"(os error {errno.ELOOP})" in text or "File system loop" in text:  # obstore's, for a link to a directory above
        if os.path.isdir(path := url.removeprefix("file://")):
            failed = OriginUnavailableError(
                f"{url} contains a link that leads to itself",
                next_step=f"find it with 'find {path} -maxdepth 1 -type l', and remove it",
            )
            failed.is_final = True
            return failed
        return ObjectNotFoundError(f"{url} is a link that leads to itself", next_step="remove the link")
    return None


def panicked(url: str) -> OriginUnavailableError:
    """Our error for an internal error of obstore (`is_panic`). Its text is not repeated: it may quote a credential."""
    failed = OriginUnavailableError(
        f"{url}: the object store client failed with an internal error",
        next_step="check the name, the endpoint, the region and the credentials for unusual characters",
    )
    failed.is_final = True
    return failed


def _no_credentials(status: int | None, url: str) -> MillraceError:
    """The error for a failed request for credentials."""
    if _is_final(status):
        return DeniedError(
            f"{url}: the service for the credentials of this machine or pod refuses them (status {status})",
            next_step="check its role or identity, and the token file and the variables that name them",
        )
    return OriginUnavailableError(
        f"{url}: the service for the credentials of this machine or pod does not respond"
        + (f" (status {status})" if status is not None else ""),
        next_step="check that it is up and reachable from this machine",
    )


def _is_final(status: int | None) -> bool:
    """Whether a status means that the same request will not succeed later."""
    return status is not None and (status in (501, 505) or (400 <= status < 500 and status not in (408, 425, 429)))


def _first_line(error: BaseException) -> str:
    """The first line of a dependency's message, shortened."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # The first line is "error sending request"; the cause is in the lines below it, as text.
    kinds = [_KINDS[kind] for kind in _KIND.findall("\n".join(lines[1:])) if kind in _KINDS]
    return _HELD.sub("a string", lines[0])[:200] + (f": {kinds[-1]}" if kinds else "")
