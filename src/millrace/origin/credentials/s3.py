"""The credentials that obstore does not find: those of `~/.aws`, by botocore where it is installed.

obstore itself reads the `AWS_*` variables, web identity, container and instance metadata. Without any of them it would ask
the metadata address of EC2 until its retries end, and the user would read of an unreachable host.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from millrace.errors import ConfigurationError, DeniedError, MissingDependencyError
from millrace.origin.credentials.provider import Answer, Found, Provider, metadata_answers
from millrace.origin.importing import imported, is_installed
from millrace.origin.options import StoreOptions

# Variables by which obstore finds credentials by itself.
_OBSTORE_READS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
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
    if profile is None and any(environ.get(name) for name in _OBSTORE_READS):
        return Found()
    profile = profile or environ.get("AWS_PROFILE") or None
    if is_installed("botocore"):
        return Found(provider=Provider(lambda: _by_botocore(profile)))
    if profile is not None:
        raise MissingDependencyError(
            f"the AWS profile {profile!r} cannot be read without botocore", next_step="pip install 'millrace[s3]'"
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
    except errors.BotoCoreError as error:
        raise none_found() from error
    if credentials is None:
        raise none_found()

    def answer() -> dict[str, Any]:
        try:
            frozen = credentials.get_frozen_credentials()
        except errors.BotoCoreError as error:
            raise DeniedError(
                "the AWS credentials have expired and could not be renewed",
                next_step="log in again (`aws sso login`), or see to the program or role of the profile",
            ) from error
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


def none_found() -> DeniedError:
    """No credentials, and what to do."""
    return DeniedError(
        "no credentials for S3 were found",
        next_step="give 'key' and 'secret', a 'profile', AWS_* variables, or anon=True for a public bucket",
    )
