"""Turns obstore's exceptions into Millrace's."""

from __future__ import annotations

import re

from millrace.errors import (
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginUnavailableError,
)
from millrace.origin.obstore_library import obstore_library

# The error code of the S3 protocol. obstore gives it on only inside its text; where it does not, the error is a general one.
_S3_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")

# Answers to a listing, which obstore does not tell from any other failure.
_REFUSALS = frozenset({"AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"})


def s3_code(error: BaseException) -> str | None:
    """The error code in the server's answer (`NoSuchBucket`, ...), None where there is none."""
    match = _S3_CODE.search(str(error))
    return match[1] if match else None


def translate(error: Exception, url: str, identity: str) -> MillraceError | None:
    """Our error for one of obstore's; None for what is a fault of our own."""
    library = obstore_library().exceptions
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{url} does not exist", next_step="check the name and the endpoint")
    if isinstance(error, library.PreconditionError):
        return ObjectChangedError(f"{url} was overwritten while it was read", next_step="open it again")
    if isinstance(error, library.AlreadyExistsError):
        return ObjectExistsError(f"{url} exists already", next_step="choose another name")
    refused = isinstance(error, library.PermissionDeniedError | library.UnauthenticatedError | PermissionError)
    if refused or s3_code(error) in _REFUSALS:
        return DeniedError(
            f"access to {url} was denied", next_step="check the credentials and their rights on this bucket"
        )
    if isinstance(error, library.InvalidPathError):
        return ObjectNotFoundError(f"{url} is no valid object name", next_step="check the name")
    if s3_code(error) == "NoSuchBucket":
        bucket = "/".join(url.split("/", 3)[:3])
        return ObjectNotFoundError(f"the bucket of {url} does not exist", next_step=f"check {bucket} and the endpoint")
    if isinstance(error, library.BaseError | OSError | ValueError):
        return OriginUnavailableError(
            f"{url}: {identity} failed ({_first_line(error)})",
            next_step="check that the endpoint is up and reachable from this machine",
        )
    return None


def _first_line(error: BaseException) -> str:
    """The first line of a dependency's message, short enough for one line of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
