"""Credentials of Google Cloud, by google-auth where it is installed; else what obstore finds itself.

google-auth knows the files that `gcloud` writes, service accounts, federated ones, and the identity of the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC
from typing import Any

from millrace.errors import ConfigurationError, DeniedError, OriginUnavailableError
from millrace.origin.credentials.provider import Answer, Found, Provider, metadata_answers
from millrace.origin.importing import imported, is_installed
from millrace.origin.options import StoreOptions

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_METADATA_ADDRESS = ("metadata.google.internal", 80)

# Variables by which obstore finds credentials by itself.
_OBSTORE_READS = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_GCLOUD_FILE = "~/.config/gcloud/application_default_credentials.json"


def gcs_credentials(options: StoreOptions, environ: Mapping[str, str]) -> Found:
    """Where the credentials come from. Raises `DeniedError` when there are none, `ConfigurationError` for a bad `token`."""
    token = options.hints.get("token")
    if token is None and any(environ.get(name) for name in _OBSTORE_READS):
        return Found()
    named = environ.get(_VARIABLE)
    if token in (None, "google_default") and named and not os.path.isfile(os.path.expanduser(named)):
        raise ConfigurationError(
            f"{_VARIABLE} names {named}, and there is no such file", next_step="correct the variable, or unset it"
        )
    if is_installed("google.auth"):
        return Found(provider=Provider(lambda: _by_google_auth(token)))
    if isinstance(token, Mapping):
        return Found(config={"service_account_key": json.dumps(dict(token))})
    path = token if token not in (None, "google_default", "cloud") else named
    if path is not None:
        return Found(config={"application_credentials": _existing(path)})
    if (token != "cloud" and os.path.exists(os.path.expanduser(_GCLOUD_FILE))) or metadata_answers(_METADATA_ADDRESS):
        return Found()
    raise none_found()


def _existing(path: str) -> str:
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise ConfigurationError(
            "GCS option 'token' names no file, and is no way to log in",
            next_step="give the path of a JSON file, a dict, 'anon', 'google_default' or 'cloud'",
        )
    return path


def _by_google_auth(token: Any) -> Answer:
    auth: Any = imported("google.auth")
    errors: Any = imported("google.auth.exceptions")
    credentials = _load(auth, errors, token)
    request = _request()

    def answer() -> dict[str, Any]:
        try:
            if not credentials.valid:
                credentials.refresh(request)
        except errors.TransportError as error:
            raise OriginUnavailableError(
                "Google's token service cannot be reached", next_step="check the network of this machine"
            ) from error
        except errors.GoogleAuthError as error:
            raise none_found() from error
        expiry = credentials.expiry
        return {"token": credentials.token, "expires_at": expiry and expiry.replace(tzinfo=expiry.tzinfo or UTC)}

    return answer


def _load(auth: Any, errors: Any, token: Any) -> Any:
    """The credentials that `token` names; those of the environment where it is None."""
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
        raise _unusable("its file holds no object")
    return content


def _from_content(content: Mapping[str, Any]) -> Any:
    """Credentials of the two kinds that name nothing to run and nowhere else to ask; others only by the environment."""
    kind = content.get("type")
    try:
        if kind == "service_account":
            service: Any = imported("google.oauth2.service_account")
            return service.Credentials.from_service_account_info(dict(content), scopes=_SCOPES)
        if kind == "authorized_user":
            user: Any = imported("google.oauth2.credentials")
            return user.Credentials.from_authorized_user_info(dict(content))
    except ValueError as error:
        raise _unusable(f"it is no complete {kind}") from error
    raise _unusable("its type is neither service_account nor authorized_user")


def _unusable(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"GCS option 'token' cannot be used: {why}",
        next_step="give a service account, or set GOOGLE_APPLICATION_CREDENTIALS and leave 'token' out",
    )


def _request() -> Any:
    """google-auth's way to its token service, over the HTTP library that we have anyway."""
    transport: Any = imported("google.auth.transport.urllib3")
    urllib3: Any = imported("urllib3")
    return transport.Request(urllib3.PoolManager(retries=False))


def none_found() -> DeniedError:
    """No credentials, and what to do."""
    return DeniedError(
        "no credentials for Google Cloud Storage were found",
        next_step="give 'token', run `gcloud auth application-default login`, or token='anon' for a public bucket",
    )
