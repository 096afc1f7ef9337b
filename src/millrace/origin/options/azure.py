"""The options of adlfs, as those of obstore."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from millrace.errors import ConfigurationError
from millrace.origin.options.store import (
    StoreOptions,
    boolean,
    check_sendable,
    check_texts,
    checked_endpoint,
    http_options,
    reject_unknown,
    stripped_environ,
)

AZURE_OPTIONS = (
    "account_host",
    "account_key",
    "account_name",
    "anon",
    "client_id",
    "client_secret",
    "connection_string",
    "credential",
    "sas_token",
    "tenant_id",
)

_SUFFIX = "core.windows.net"

# The public account of the emulator; a connection string may name it with one word.
_EMULATOR = {
    "AccountName": "devstoreaccount1",
    "AccountKey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}


def azure_options(target_options: Mapping[str, Any], environ: Mapping[str, str]) -> StoreOptions:
    """Translate adlfs-style `target_options`.

    Missing options come from the `AZURE_STORAGE_*` variables of adlfs; `credentials/azure.py` finds an identity. Raises
    `ConfigurationError` for an unknown option, options that exclude each other, an endpoint with a secret in it, or a
    missing account name.
    """
    environ = stripped_environ(environ)
    reject_unknown(target_options, AZURE_OPTIONS, "Azure option")
    given = {name: value for name, value in target_options.items() if value is not None}
    check_texts({"connection_string": given.get("connection_string")}, "Azure option", sendable=False)
    others = ("anon", "connection_string", "credential")
    check_texts({name: value for name, value in given.items() if name not in others}, "Azure option")
    anonymous = boolean(given.get("anon"), "Azure option 'anon'")
    connection = _connection(given, environ)
    account = given.get("account_name") or connection.get("AccountName") or environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    named = environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if named and account != named:  # the environment's key, signature and endpoint belong to another account
        environ = {name: value for name, value in environ.items() if not name.startswith("AZURE_STORAGE_")}
    check_sendable(account or "", "the name of the Azure account ('account_name')")
    endpoint = _endpoint(given.get("account_host"), connection, environ, account)
    if not account:
        raise ConfigurationError(
            "no Azure account is named",
            next_step="set 'account_name' or 'connection_string', or set AZURE_STORAGE_ACCOUNT_NAME",
        )
    config: dict[str, Any] = {"account_name": account, "endpoint": endpoint, "use_emulator": False}
    fixed = None if anonymous else _fixed(given, connection, environ)
    service = None if anonymous or fixed or "credential" in given else _service_principal(given, environ)
    if anonymous:
        config["skip_signature"] = True
    elif service is not None:
        config |= service
    hints: dict[str, Any] = {name: given[name] for name in ("credential", "tenant_id", "client_id") if name in given}
    return StoreOptions(
        config=config,
        client_options=http_options(endpoint),
        endpoint=endpoint,
        fixed=fixed,
        signs_itself=anonymous or service is not None,
        hints=hints,
    )


def _connection(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """The parts of the connection string: the explicit one, or the environment's if it is for this account."""
    text = given.get("connection_string")
    if text is not None and (
        clash := sorted({"account_name", "account_key", "sas_token", "account_host"} & set(given))
    ):
        raise ConfigurationError(
            f"Azure options 'connection_string' and {', '.join(map(repr, clash))} exclude each other",
            next_step="set one of them",
        )
    if text is not None:
        return _parts(text)
    parts = _parts(environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    if "account_host" in given or given.get("account_name", parts.get("AccountName")) != parts.get("AccountName"):
        return {}  # for another account
    return parts


def _parts(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in str(text).split(";") if part.strip()]
    if not all(separator for _, separator, _ in pairs):
        raise ConfigurationError(
            "the Azure connection string cannot be read",
            next_step="write NAME=VALUE;NAME=VALUE, as the portal shows it",
        )
    parts = {name.strip(): value.strip() for name, _, value in pairs}
    for value in parts.values():
        check_sendable(value, "the Azure connection string")
    return dict(_EMULATOR) if parts.get("UseDevelopmentStorage", "").lower() == "true" else parts


def _endpoint(host: str | None, connection: Mapping[str, str], environ: Mapping[str, str], account: str | None) -> str:
    """The URL of the account, without a container."""
    url = host or connection.get("BlobEndpoint")
    if not url and not connection:
        url = environ.get("AZURE_STORAGE_ENDPOINT") or environ.get("AZURE_ENDPOINT")
    if not url:
        scheme = connection.get("DefaultEndpointsProtocol", "https")
        url = f"{scheme}://{account}.blob.{connection.get('EndpointSuffix', _SUFFIX)}"
    if "://" not in url:
        url = f"https://{url}"
    return checked_endpoint(url, "'account_host'" if host else "the Azure endpoint", "'account_key' or 'sas_token'")


def _fixed(
    given: Mapping[str, Any], connection: Mapping[str, str], environ: Mapping[str, str]
) -> Mapping[str, Any] | None:
    """A key or a signature: the explicit one, otherwise the environment's."""
    if isinstance(given.get("credential"), str):  # adlfs accepts a signature there
        return _signature(given["credential"])
    if any(name in given for name in ("credential", "client_id", "client_secret")):
        return None
    key = given.get("account_key") or connection.get("AccountKey")
    signature = given.get("sas_token") or connection.get("SharedAccessSignature")
    if not key and not signature:
        key = environ.get("AZURE_STORAGE_ACCOUNT_KEY") or environ.get("AZURE_STORAGE_ACCESS_KEY")
        signature = environ.get("AZURE_STORAGE_SAS_TOKEN") or environ.get("AZURE_STORAGE_SAS_KEY")
    if key:
        _check_key(key)
        return {"access_key": key, "expires_at": None}
    return _signature(signature) if signature else None


def _check_key(key: str) -> None:
    try:
        base64.b64decode(key, validate=True)
    except ValueError:  # without the cause, whose text may contain the key
        raise ConfigurationError(
            "the Azure account key ('account_key') is not base64", next_step="copy it again, as the portal shows it"
        ) from None


def _signature(text: str) -> Mapping[str, Any]:
    check_sendable(text, "the Azure shared access signature ('sas_token')")
    return {"sas_token": text.lstrip("?"), "expires_at": None}


def _service_principal(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """A registered application with its secret, for which obstore renews tokens; None if there is none."""

    def pick(name: str) -> Any:
        upper = name.upper()
        return given.get(name) or environ.get(f"AZURE_STORAGE_{upper}") or environ.get(f"AZURE_{upper}")

    names = ("tenant_id", "client_id", "client_secret")
    found = {name: pick(name) for name in names}
    check_texts(found, "Azure option")
    if all(found.values()):
        return {**found, "credential_type": "client_secret"}
    if "client_secret" in given:
        missing = ", ".join(repr(name) for name in names if not found[name])
        raise ConfigurationError(f"Azure option 'client_secret' needs {missing}", next_step="set all three")
    return None
