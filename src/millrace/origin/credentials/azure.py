"""Azure credentials other than keys and signatures: identities, through azure-identity if it is installed.

obstore itself supports workload identity, the endpoint of a managed identity and `az`; DefaultAzureCredential supports more.
Without any of them obstore would send requests to the metadata address of Azure until its retries end.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from millrace.errors import ConfigurationError, DeniedError, MillraceError, OriginUnavailableError
from millrace.origin.credentials.provider import Found, Provider, for_obstore, metadata_responds
from millrace.origin.options import StoreOptions
from millrace.runtime.forks import imported, is_installed

_SCOPE = "https://storage.azure.com/.default"
_METADATA_ADDRESS = ("169.254.169.254", 80)


def azure_credentials(options: StoreOptions, environ: Mapping[str, str]) -> Found:
    """The source of the credentials of an identity. Raises `DeniedError` if there is none."""
    credential = options.hints.get("credential")
    if credential is not None:
        if not callable(getattr(credential, "get_token", None)):
            raise ConfigurationError(
                "Azure option 'credential' is not a credential of azure-identity",
                next_step="use an object with get_token(), or a shared access signature as text",
            )
        return Found(provider=_tokens(lambda: credential))
    for variable, kind in (
        ("AZURE_FEDERATED_TOKEN_FILE", "workload_identity"),
        ("AZURE_MSI_ENDPOINT", "managed_identity"),
        ("AZURE_IDENTITY_ENDPOINT", "managed_identity"),
    ):
        if environ.get(variable):
            return Found(config={"credential_type": kind, **for_obstore([variable], environ), **_hints(options)})
    if is_installed("azure.identity"):
        return Found(provider=_tokens(lambda: _default_credential(options)))
    if shutil.which("az"):
        return Found(config={"credential_type": "azure_cli", **_hints(options)})
    if metadata_responds(_METADATA_ADDRESS):
        return Found(config={"credential_type": "managed_identity", **_hints(options)})
    raise none_found()


def _hints(options: StoreOptions) -> dict[str, Any]:
    """The options for an identity that obstore looks for."""
    return {name: options.hints[name] for name in ("tenant_id", "client_id") if name in options.hints}


def _default_credential(options: StoreOptions) -> Any:
    library: Any = imported("azure.identity")
    found = {}
    if client := options.hints.get("client_id"):
        found = {"managed_identity_client_id": client, "workload_identity_client_id": client}
    return library.DefaultAzureCredential(**found)


def _tokens(make: Any) -> Provider:
    """A provider of tokens of the credential that `make` returns, which renews them itself."""

    def look_up() -> Any:
        credential = make()

        def read() -> dict[str, Any]:
            try:
                with _quiet():
                    token = credential.get_token(_SCOPE)
            except Exception as error:  # a credential of the user may raise any error
                raise _failed(error) from error
            return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}

        return read

    return Provider(look_up)


def _failed(error: Exception) -> MillraceError:
    """The error for a failure of a credential. Its text may contain a secret, and is not shown."""
    core: Any = sys.modules.get("azure.core.exceptions")
    status = getattr(error, "status_code", None) or 0
    unsent = core is not None and isinstance(error, core.ServiceRequestError | core.ServiceResponseError)
    if unsent or isinstance(error, ConnectionError | TimeoutError) or status == 429 or status >= 500:
        return OriginUnavailableError(
            "Azure's token service does not respond", next_step="check the network of this machine"
        )
    return none_found()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide this thread's many warnings of azure-identity about places without credentials, except at level DEBUG."""
    logger, thread = logging.getLogger("azure.identity"), threading.get_ident()
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != thread or not record.name.startswith("azure.identity")

    # Filters of a logger do not apply to its children, so the handlers need them.
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
    """The error for missing credentials."""
    return DeniedError(
        "no credentials for Azure were found",
        next_step="set 'account_key', 'sas_token' or a client secret, run `az login`, or anon=True for a public container",
    )
