"""Credentials that obstore does not find: those of `~/.aws`, through botocore if it is installed.

obstore itself reads the `AWS_*` variables, web identity, container and instance metadata. Without any of them it would send
requests to the metadata address of EC2 until its retries end, and report an unreachable host.
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
from millrace.origin.credentials.provider import (
    Found,
    Provider,
    ReadCredentials,
    for_obstore,
    metadata_responds,
    usable,
)
from millrace.origin.options import StoreOptions
from millrace.runtime.forks import imported, is_installed

# obstore finds credentials by itself if all variables of a row are set; otherwise it would request EC2's metadata.
_OBSTORE_READS = (
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
_METADATA_ADDRESS = ("169.254.169.254", 80)
_THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"})
_MOST_AGE = timedelta(minutes=15)  # credentials without an expiry are requested again after this


def s3_credentials(options: StoreOptions, environ: Mapping[str, str]) -> Found:
    """The source of the credentials, for options without any.

    Raises `DeniedError` if there are none, `MissingDependencyError` for a profile without botocore, and
    `ConfigurationError` for a profile that does not exist.
    """
    profile = options.hints.get("profile")
    key, secret = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
    if profile is None and bool(environ.get(key)) != bool(environ.get(secret)):
        there, missing = (key, secret) if environ.get(key) else (secret, key)
        if there == key or not environ.get("AWS_PROFILE"):
            raise DeniedError(f"{there} is set without {missing}", next_step="set both variables, or neither")
    if profile is None and environ.get(key):
        token = environ.get("AWS_SESSION_TOKEN") or None
        given = {
            "access_key_id": environ[key],
            "secret_access_key": environ[secret],
            "token": token,
            "expires_at": None,
        }
        fixed = usable(given)
        changed = for_obstore([name for name in (key, secret, "AWS_SESSION_TOKEN") if name in environ], environ)
        # obstore uses the variables as they are.
        return Found(provider=Provider(lambda: lambda: fixed)) if changed else Found()
    for names in _OBSTORE_READS:
        if profile is None and all(environ.get(name) for name in names):
            return Found(config=for_obstore(names, environ))
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
    if not metadata_responds(_METADATA_ADDRESS):
        raise none_found()
    return Found()


def _by_botocore(profile: str | None) -> ReadCredentials:
    session_module: Any = imported("botocore.session")
    errors: Any = imported("botocore.exceptions")
    try:
        credentials = session_module.Session(profile=profile).get_credentials()
    except errors.ProfileNotFound as error:
        raise ConfigurationError(
            f"there is no AWS profile {profile or ''!r}", next_step="correct 'profile' or AWS_PROFILE, or unset it"
        ) from error
    except Exception as error:  # profiles, programs and services raise any error
        raise _failed(errors, error) from error
    if credentials is None:
        raise none_found()

    def read() -> dict[str, Any]:
        try:
            frozen = credentials.get_frozen_credentials()
        except Exception as error:  # as above, during a renewal
            raise _failed(errors, error) from error
        latest = datetime.now(UTC) + _MOST_AGE
        # botocore renews them itself in a call near their expiry, which only it has.
        expiry: datetime | None = getattr(credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": min(latest, expiry.astimezone(UTC)) if expiry is not None else latest,
        }

    return read


def _failed(errors: Any, error: Exception) -> MillraceError:
    """The error for a failure of botocore. Its text may contain the output of a program or service, and is not shown."""
    status, code = 0, ""
    if isinstance(error, errors.ClientError):
        response: Mapping[str, Any] = getattr(error, "response", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = response.get("Error", {}).get("Code", "")
    is_throttled = status == 429 or code in _THROTTLED  # STS has the status 400 for it
    if is_throttled or status >= 500 or isinstance(error, errors.ConnectionError | errors.HTTPClientError):
        return OriginUnavailableError(
            "the service with the AWS credentials does not respond",
            next_step="check that this machine can reach it, and AWS_ENDPOINT_URL_STS where it is set",
        )
    return DeniedError(
        "the AWS credentials could not be obtained, or have expired and could not be renewed",
        next_step="log in again (`aws sso login`), or check the program, role or identity behind them",
    )


def none_found() -> DeniedError:
    """The error for missing credentials."""
    return DeniedError(
        "no credentials for S3 were found",
        next_step="set 'key' and 'secret', a 'profile', AWS_* variables, or anon=True for a public bucket",
    )
