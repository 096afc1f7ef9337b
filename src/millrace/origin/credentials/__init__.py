"""Finds credentials in the usual places of users; one module per scheme.

Key terms:
- explicit credentials: given as options. They are used as they are, and never renewed.
- place: where other credentials are found: the environment, a profile, a file, a program, or a service of the cloud.
- provider: the function that obstore calls for credentials, and again when they expire.

Each process finds credentials in a place for itself. They are never pickled.
Start reading in `provider.py`, then `s3.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millrace.origin.credentials.azure import azure_credentials
from millrace.origin.credentials.gcs import gcs_credentials
from millrace.origin.credentials.provider import Found, Provider
from millrace.origin.credentials.s3 import s3_credentials
from millrace.origin.options import StoreOptions
from millrace.origin.options.store import stripped_environ

__all__ = ["Found", "Provider", "find_credentials"]

_FINDERS: Mapping[str, Callable[[StoreOptions, Mapping[str, str]], Found]] = {
    "s3": s3_credentials,
    "az": azure_credentials,
    "gs": gcs_credentials,
}


def find_credentials(scheme: str, options: StoreOptions, environ: Mapping[str, str]) -> Found:
    """The source of the credentials for `options`. Raises `DeniedError` if there are none, and `ConfigurationError`."""
    environ = stripped_environ(environ)
    if options.signs_itself:
        return Found()
    if options.fixed is not None:
        fixed = dict(options.fixed)
        return Found(provider=Provider(lambda: lambda: fixed))
    return _FINDERS[scheme](options, environ)
