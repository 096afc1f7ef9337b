"""Turns obstore's exceptions into Millrace's.

obstore tells apart what its callers can decide about, and gives everything else as one general error with the server's
answer in its text: status and code are read from there.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from millrace.errors import (
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
)
from millrace.origin.obstore_library import obstore_library

# The error code of S3, GCS and Azure, in the body of an answer.
_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})\b|\bstatus: (\d{3})\b")
# The address of the request that failed, which obstore hides where there is a token in it.
_ASKED = re.compile(r"Error performing [A-Z]+ (\S+) in ")
# What an answer held in the place of something else.
_HELD = re.compile(r'\bstring ".*?"(?=, expected)')

_NO_BUCKET = frozenset(
    {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "InvalidBucketName", "InvalidResourceName"}
)

# Answers that obstore does not always tell from any other failure.
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
_EXPIRED = frozenset({"ExpiredToken", "RequestExpired", "TokenRefreshRequired"})
_BUSY = frozenset({429, 503})


def server_code(error: BaseException) -> str | None:
    """The error code in the server's answer (`NoSuchBucket`, ...), None where there is none."""
    match = _CODE.search(str(error))
    return match[1] if match else None


def is_outside(error: BaseException) -> bool:
    """Whether a range begins behind the object's end, as the server says, or obstore when the server sent what there was."""
    return server_code(error) == "InvalidRange" or "InvalidRangeRequest" in str(error)


def http_status(error: BaseException) -> int | None:
    """The status of the server's answer, None where there was no answer."""
    match = _STATUS.search(str(error))
    return int(match[1] or match[2]) if match else None


def asked_for_credentials(error: BaseException, url: str) -> bool:
    """Whether what failed was no request for the object `url` but one for the identity of this machine or pod.

    The address of such a question does not name the bucket. (Where it does by chance, the error is told as any other.)
    """
    match = _ASKED.search(str(error))
    scheme, _, key = url.partition("://")
    if match is None:
        return False
    if match[1] == "REDACTED":
        return scheme == "s3"  # there only what STS is asked; of Azure, every request with a signature in its address
    return key.partition("/")[0] not in unquote(match[1])


def bucket_word(scheme: str) -> str:
    """What users of the service call a bucket."""
    return "container" if scheme == "az" else "bucket"


def translate(
    error: Exception, url: str, identity: str, credentials_error: MillraceError | None = None
) -> MillraceError | None:
    """Our error for one of obstore's; None for what is a fault of our own.

    `credentials_error` is what asking for credentials has raised, if it has: obstore gives on only its text.
    """
    library = obstore_library().exceptions
    if credentials_error is not None and isinstance(error, library.BaseError) and http_status(error) is None:
        return type(credentials_error)(credentials_error.message, next_step=credentials_error.next_step)
    if isinstance(error, library.BaseError | OSError) and asked_for_credentials(error, url):
        return _no_credentials(http_status(error), url)
    code = server_code(error)
    if code in _NO_BUCKET:
        bucket = "/".join(url.split("/", 3)[:3])
        return ObjectNotFoundError(
            f"the {bucket_word(url.partition(':')[0])} of {url} does not exist",
            next_step=f"check {bucket} and the endpoint",
        )
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{url} does not exist", next_step="check the name and the endpoint")
    if isinstance(error, library.PreconditionError):
        return ObjectChangedError(f"{url} was overwritten while it was read", next_step="open it again")
    if isinstance(error, library.AlreadyExistsError):
        return ObjectExistsError(f"{url} exists already", next_step="choose another name")
    if code in _EXPIRED:
        return DeniedError(
            f"the credentials for {url} have expired",
            next_step="give new ones, or a profile or an identity, which are renewed without asking",
        )
    if http_status(error) == 400 and code is None:
        # So S3 answers a HEAD with credentials that have expired: without a body there is no place for the reason.
        return DeniedError(
            f"{url}: the origin refuses the request (status 400), and does not say why",
            next_step="check that the credentials have not expired, and the name",
        )
    refused = isinstance(error, library.PermissionDeniedError | library.UnauthenticatedError | PermissionError)
    if refused or code in _REFUSALS or http_status(error) in (401, 403):
        return DeniedError(
            f"access to {url} was denied",
            next_step="check the credentials and their rights on this " + bucket_word(url.partition(":")[0]),
        )
    if isinstance(error, library.InvalidPathError):
        return ObjectNotFoundError(f"{url} is no valid object name", next_step="check the name")
    if http_status(error) in _BUSY:
        return OriginBusyError(
            f"{url}: {identity} asks for fewer requests (status {http_status(error)})",
            next_step="try again later, or with fewer workers",
        )
    if isinstance(error, library.BaseError | OSError | ValueError):
        failed = OriginUnavailableError(
            f"{url}: {identity} failed ({_first_line(error)})",
            next_step="check that the endpoint is up and reachable from this machine",
        )
        failed.is_final = _is_final(http_status(error))
        return failed
    return None


def _no_credentials(status: int | None, url: str) -> MillraceError:
    """The error for a question for credentials that was answered with an error, or not at all."""
    if _is_final(status):
        return DeniedError(
            f"{url}: the service that gives this machine or pod its credentials refuses them (status {status})",
            next_step="check its role or identity, and the token file and the variables that name them",
        )
    return OriginUnavailableError(
        f"{url}: the service that gives this machine or pod its credentials does not answer"
        + (f" (status {status})" if status is not None else ""),
        next_step="check that it is up and reachable from this machine",
    )


def _is_final(status: int | None) -> bool:
    """Whether an answer says that the same request will not succeed later either."""
    return status is not None and (status in (501, 505) or (400 <= status < 500 and status not in (408, 425, 429)))


def _first_line(error: BaseException) -> str:
    """The first line of a dependency's message, short enough for one line of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _HELD.sub("a string", lines[0])[:200]
