"""Finds credentials where users keep them; one module per scheme.

What the user gave explicitly is answered as it is. Everything else is found by each process for itself and never pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millrace.origin.credentials.azure import azure_credentials
from millrace.origin.credentials.gcs import gcs_credentials
from millrace.origin.credentials.provider import Found, Provider
from millrace.origin.credentials.s3 import s3_credentials
from millrace.origin.options import StoreOptions

__all__ = ["Found", "Provider", "find_credentials"]

_FINDERS: Mapping[str, Callable[[StoreOptions, Mapping[str, str]], Found]] = {
    "s3": s3_credentials,
    "az": azure_credentials,
    "gs": gcs_credentials,
}


def find_credentials(scheme: str, options: StoreOptions, environ: Mapping[str, str]) -> Found:
    """Where the credentials for `options` come from. Raises `DeniedError` when there are none, and `ConfigurationError`."""
    if options.signs_itself:
        return Found()
    if options.fixed is not None:
        fixed = dict(options.fixed)
        return Found(provider=Provider(lambda: lambda: fixed))
    return _FINDERS[scheme](options, environ)
