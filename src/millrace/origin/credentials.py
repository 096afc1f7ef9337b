"""Finds the credentials that obstore does not find: those of `~/.aws`, by botocore where it is installed.

obstore itself reads the `AWS_*` variables, web identity, container and instance metadata. Without any of them it would ask
the metadata address of EC2 until its retries end, and the user would read of an unreachable host.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from millrace.errors import ConfigurationError, DeniedError, MissingDependencyError
from millrace.origin.options import StoreOptions

# Variables by which obstore finds credentials by itself.
_OBSTORE_READS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_METADATA_ADDRESS = ("169.254.169.254", 80)
_ANSWER_SECONDS = timedelta(minutes=15)  # botocore refreshes by itself; obstore asks again after this


def credential_provider(options: StoreOptions, environ: Mapping[str, str]) -> Callable[[], dict[str, Any]] | None:
    """What obstore shall call for credentials; None when it finds them itself.

    Raises `DeniedError` when there are none, `MissingDependencyError` for a profile without botocore, and
    `ConfigurationError` for a profile that does not exist.
    """
    if options.signs_itself:
        return None
    profile = options.profile
    if profile is None and any(environ.get(name) for name in _OBSTORE_READS):
        return None
    profile = profile or environ.get("AWS_PROFILE") or None
    if importlib.util.find_spec("botocore") is not None:
        return _from_botocore(profile)
    if profile is not None:
        raise MissingDependencyError(
            f"the AWS profile {profile!r} cannot be read without botocore", next_step="pip install 'millrace[s3]'"
        )
    try:
        socket.create_connection(_METADATA_ADDRESS, timeout=1).close()
    except OSError as error:
        raise _none_found() from error
    return None


def _from_botocore(profile: str | None) -> Callable[[], dict[str, Any]]:
    session_module: Any = importlib.import_module("botocore.session")
    errors: Any = importlib.import_module("botocore.exceptions")
    try:
        credentials = session_module.Session(profile=profile).get_credentials()
    except errors.ProfileNotFound as error:
        raise ConfigurationError(
            f"there is no AWS profile {profile!r}", next_step="correct 'profile' or AWS_PROFILE"
        ) from error
    except errors.BotoCoreError as error:
        raise _none_found() from error
    if credentials is None:
        raise _none_found()

    def answer() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _ANSWER_SECONDS,
        }

    return answer


def _none_found() -> DeniedError:
    return DeniedError(
        "no credentials for S3 were found",
        next_step="give 'key' and 'secret', a 'profile', AWS_* variables, or anon=True for a public bucket",
    )
