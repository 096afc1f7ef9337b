"""Credentials of Google Cloud, through google-auth if it is installed; otherwise those that obstore finds itself.

google-auth supports the files of `gcloud`, service accounts, federated ones, and the identity of the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC
from typing import Any

from millrace.errors import ConfigurationError, DeniedError, OriginUnavailableError
from millrace.origin.credentials.provider import Found, Provider, ReadCredentials, for_obstore, metadata_responds
from millrace.origin.options import StoreOptions
from millrace.runtime.forks import imported, is_installed

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_METADATA_ADDRESS = ("metadata.google.internal", 80)

# obstore finds credentials by itself with these variables.
_OBSTORE_READS = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_GCLOUD_FILE = "~/.config/gcloud/application_default_credentials.json"


def gcs_credentials(options: StoreOptions, environ: Mapping[str, str]) -> Found:
    """The source of the credentials. Raises `DeniedError` if there are none, `ConfigurationError` for a bad `token`."""
    token = options.hints.get("token")
    if token is None and (names := [name for name in _OBSTORE_READS if environ.get(name)]):
        return Found(config=for_obstore(names, environ))
    named = environ.get(_VARIABLE)
    if token in (None, "google_default") and named and not os.path.isfile(os.path.expanduser(named)):
        raise ConfigurationError(
            f"{_VARIABLE} names {named}, which does not exist", next_step="correct the variable, or unset it"
        )
    if is_installed("google.auth"):
        return Found(provider=Provider(lambda: _by_google_auth(token)))
    if isinstance(token, Mapping):
        return Found(config={"service_account_key": json.dumps(dict(token))})
    path = token if token not in (None, "google_default", "cloud") else named
    if path is not None:
        return Found(config={"application_credentials": _existing(path)})
    if (token != "cloud" and os.path.exists(os.path.expanduser(_GCLOUD_FILE))) or metadata_responds(_METADATA_ADDRESS):
        return Found()
    raise none_found()


def _existing(path: str) -> str:
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise ConfigurationError(
            "GCS option 'token' is neither a file nor a way to log in",
            next_step="use the path of a JSON file, a dict, 'anon', 'google_default' or 'cloud'",
        )
    return path


def _by_google_auth(token: Any) -> ReadCredentials:
    auth: Any = imported("google.auth")
    errors: Any = imported("google.auth.exceptions")
    credentials = _load(auth, errors, token)
    request = _request()

    def read() -> dict[str, Any]:
        try:
            if not credentials.valid:
                credentials.refresh(request)
        except errors.TransportError as error:
            raise _unreachable() from error
        except errors.GoogleAuthError as error:
            # The metadata service has failed: temporarily, if it has sent a token before.
            is_lost = isinstance(error.__cause__, errors.TransportError) and credentials.token is not None
            if error.retryable or is_lost:
                raise _unreachable() from error
            raise none_found() from error
        expiry = credentials.expiry
        return {"token": credentials.token, "expires_at": expiry and expiry.replace(tzinfo=expiry.tzinfo or UTC)}

    return read


def _load(auth: Any, errors: Any, token: Any) -> Any:
    """The credentials of `token`; those of the environment for None."""
    if isinstance(token, Mapping):
        return _from_content(token)
    if token == "cloud":
        engine: Any = imported("google.auth.compute_engine")
        return engine.Credentials()
    if token not in (None, "google_default"):
        return _from_content(_content(_existing(token))) if isinstance(token, str) else token
    try:
        return auth.default(scopes=_SCOPES)[0]
    except errors.DefaultCredentialsError as error:
        raise none_found() from error


def _content(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = json.load(file)
    except (OSError, ValueError) as error:
        raise _unusable("its file cannot be read") from error
    if not isinstance(content, dict):
        raise _unusable("its file is not a JSON object")
    return content


def _from_content(content: Mapping[str, Any]) -> Any:
    """Credentials of the two kinds without commands or other addresses; others are only accepted from the environment."""
    kind = content.get("type")
    try:
        if kind == "service_account":
            service: Any = imported("google.oauth2.service_account")
            return service.Credentials.from_service_account_info(dict(content), scopes=_SCOPES)
        if kind == "authorized_user":
            user: Any = imported("google.oauth2.credentials")
            return user.Credentials.from_authorized_user_info(dict(content))
    except ValueError as error:
        raise _unusable(f"it is not a complete {kind}") from error
    raise _unusable("its type is neither service_account nor authorized_user")


def _unusable(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"GCS option 'token' cannot be used: {why}",
        next_step="use a service account, or set GOOGLE_APPLICATION_CREDENTIALS without 'token'",
    )


def _request() -> Any:
    """google-auth's transport, over the HTTP library that Millrace uses anyway."""
    transport: Any = imported("google.auth.transport.urllib3")
    urllib3: Any = imported("urllib3")
    return transport.Request(urllib3.PoolManager(retries=False))


def _unreachable() -> OriginUnavailableError:
    return OriginUnavailableError(
        "Google's token service cannot be reached", next_step="check the network of this machine"
    )


def none_found() -> DeniedError:
    """The error for missing credentials."""
    return DeniedError(
        "no credentials for Google Cloud Storage were found",
        next_step="set 'token', run `gcloud auth application-default login`, or token='anon' for a public bucket",
    )
