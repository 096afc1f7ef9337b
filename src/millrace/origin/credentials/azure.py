"""Credentials of Azure that are neither a key nor a signature: identities, by azure-identity where it is installed.

obstore itself knows workload identity, the endpoint of a managed identity and `az`; DefaultAzureCredential knows these and
more. Without any of them obstore would ask the metadata address of Azure until its retries end.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from millrace.errors import ConfigurationError, DeniedError
from millrace.origin.credentials.provider import Found, Provider, metadata_answers
from millrace.origin.importing import imported, is_installed
from millrace.origin.options import StoreOptions

_SCOPE = "https://storage.azure.com/.default"
_METADATA_ADDRESS = ("169.254.169.254", 80)


def azure_credentials(options: StoreOptions, environ: Mapping[str, str]) -> Found:
    """Where the credentials of an identity come from. Raises `DeniedError` when there is none."""
    credential = options.hints.get("credential")
    if credential is not None:
        if not callable(getattr(credential, "get_token", None)):
            raise ConfigurationError(
                "Azure option 'credential' is no credential of azure-identity",
                next_step="give an object with get_token(), or a shared access signature as text",
            )
        return Found(provider=_tokens(lambda: credential))
    for variable, kind in (
        ("AZURE_FEDERATED_TOKEN_FILE", "workload_identity"),
        ("AZURE_MSI_ENDPOINT", "managed_identity"),
        ("AZURE_IDENTITY_ENDPOINT", "managed_identity"),
    ):
        if environ.get(variable):
            return Found(config={"credential_type": kind, **_told(options)})
    if is_installed("azure.identity"):
        return Found(provider=_tokens(lambda: _default_credential(options)))
    if shutil.which("az"):
        return Found(config={"credential_type": "azure_cli", **_told(options)})
    if metadata_answers(_METADATA_ADDRESS):
        return Found(config={"credential_type": "managed_identity", **_told(options)})
    raise none_found()


def _told(options: StoreOptions) -> dict[str, Any]:
    """What the options say about an identity that obstore looks for."""
    return {name: options.hints[name] for name in ("tenant_id", "client_id") if name in options.hints}


def _default_credential(options: StoreOptions) -> Any:
    library: Any = imported("azure.identity")
    told = {}
    if client := options.hints.get("client_id"):
        told = {"managed_identity_client_id": client, "workload_identity_client_id": client}
    return library.DefaultAzureCredential(**told)


def _tokens(make: Any) -> Provider:
    """Answers with tokens of the credential that `make` makes; it renews them itself."""

    def look_up() -> Any:
        credential = make()

        def answer() -> dict[str, Any]:
            try:
                with _quiet():
                    token = credential.get_token(_SCOPE)
            except Exception as error:  # whatever a credential of the user's own raises
                raise none_found() from error
            return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}

        return answer

    return Provider(look_up)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """azure-identity warns in many lines of every place without credentials: this thread's, at DEBUG only."""
    logger, thread = logging.getLogger("azure.identity"), threading.get_ident()
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != thread or not record.name.startswith("azure.identity")

    # Filters of a logger do not see what its children log, so that those of the handlers are needed.
    handlers = [handler for at in _ancestry(logger) for handler in at.handlers]
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)


def _ancestry(logger: logging.Logger) -> list[logging.Logger]:
    found = [logger]
    while found[-1].propagate and found[-1].parent is not None:
        found.append(found[-1].parent)
    return found


def none_found() -> DeniedError:
    """No credentials, and what to do."""
    return DeniedError(
        "no credentials for Azure were found",
        next_step="give 'account_key', 'sas_token' or a client secret, run `az login`, or anon=True for a public container",
    )
