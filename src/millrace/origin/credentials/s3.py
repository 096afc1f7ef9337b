"""The credentials that obstore does not find: those of `~/.aws`, by botocore where it is installed.

obstore itself reads the `AWS_*` variables, web identity, container and instance metadata. Without any of them it would ask
the metadata address of EC2 until its retries end, and the user would read of an unreachable host.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    MissingDependencyError,
    OriginUnavailableError,
)
from millrace.origin.credentials.provider import Answer, Found, Provider, metadata_answers
from millrace.origin.importing import imported, is_installed
from millrace.origin.options import StoreOptions

# Variables by which obstore finds credentials by itself, where it has all of a row; else it would ask for EC2's metadata.
_OBSTORE_READS = (
    ("AWS_ACCESS_KEY_ID",),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
_METADATA_ADDRESS = ("169.254.169.254", 80)
_ANSWER_SECONDS = timedelta(minutes=15)  # what botocore does not know the end of is asked for again after this


def s3_credentials(options: StoreOptions, environ: Mapping[str, str]) -> Found:
    """Where the credentials come from, for options without any.

    Raises `DeniedError` when there are none, `MissingDependencyError` for a profile without botocore, and
    `ConfigurationError` for a profile that does not exist.
    """
    profile = options.hints.get("profile")
    key, secret = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
    if profile is None and bool(environ.get(key)) != bool(environ.get(secret)):
        there, missing = (key, secret) if environ.get(key) else (secret, key)
        if there == key or not environ.get("AWS_PROFILE"):
            raise DeniedError(f"{there} is set without {missing}", next_step="set both variables, or neither")
    if profile is None and any(all(environ.get(name) for name in names) for names in _OBSTORE_READS):
        return Found()
    profile = profile or environ.get("AWS_PROFILE") or None
    if profile is None and environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        raise DeniedError("AWS_WEB_IDENTITY_TOKEN_FILE is set without AWS_ROLE_ARN", next_step="set both, or neither")
    if is_installed("botocore"):
        return Found(provider=Provider(lambda: _by_botocore(profile)))
    if profile is not None:
        raise MissingDependencyError(
            f"the AWS profile {profile!r} cannot be read without botocore", next_step="pip install 'millrace[s3]'"
        )
    if environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        raise MissingDependencyError(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI without AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE needs botocore",
            next_step="pip install 'millrace[s3]'",
        )
    if not metadata_answers(_METADATA_ADDRESS):
        raise none_found()
    return Found()


def _by_botocore(profile: str | None) -> Answer:
    session_module: Any = imported("botocore.session")
    errors: Any = imported("botocore.exceptions")
    try:
        credentials = session_module.Session(profile=profile).get_credentials()
    except errors.ProfileNotFound as error:
        raise ConfigurationError(
            f"there is no AWS profile {profile!r}", next_step="correct 'profile' or AWS_PROFILE"
        ) from error
    except Exception as error:  # a profile is read, files, programs and services are asked: they raise what they like
        raise _failed(errors, error) from error
    if credentials is None:
        raise none_found()

    def answer() -> dict[str, Any]:
        try:
            frozen = credentials.get_frozen_credentials()
        except Exception as error:  # as above, now that they are to be renewed
            raise _failed(errors, error) from error
        latest = datetime.now(UTC) + _ANSWER_SECONDS
        # botocore renews them itself when it is asked near their end; only it knows when that is.
        expiry: datetime | None = getattr(credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": min(latest, expiry.astimezone(UTC)) if expiry is not None else latest,
        }

    return answer


def _failed(errors: Any, error: Exception) -> MillraceError:
    """Why botocore gives no credentials. Its own text may hold what a program or a service has answered, and is not told."""
    status = 0
    if isinstance(error, errors.ClientError):
        answer: Mapping[str, Any] = getattr(error, "response", {})
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or isinstance(error, errors.ConnectionError | errors.HTTPClientError):
        return OriginUnavailableError(
            "the service that gives the AWS credentials does not answer",
            next_step="check that this machine can reach it, and AWS_ENDPOINT_URL_STS where it is set",
        )
    return DeniedError(
        "the AWS credentials could not be obtained, or have expired and could not be renewed",
        next_step="log in again (`aws sso login`), or see to the program, role or identity that gives them",
    )


def none_found() -> DeniedError:
    """No credentials, and what to do."""
    return DeniedError(
        "no credentials for S3 were found",
        next_step="give 'key' and 'secret', a 'profile', AWS_* variables, or anon=True for a public bucket",
    )
