"""Translates the options of s3fs, adlfs and gcsfs into those of obstore. Pure; one module per scheme.

Key terms:
- target options: the options of the user, named as in s3fs, adlfs or gcsfs.
- store options: the same options for obstore's constructor and HTTP client (`StoreOptions`).
- hint: an option that names the place of the credentials, such as a profile or a file.

An unknown option is an error that lists the known ones: a misspelt `secret` must not become an anonymous request.
Start reading in `store.py`, then `s3.py`.
"""

from __future__ import annotations

from millrace.origin.options.azure import azure_options
from millrace.origin.options.gcs import gcs_options
from millrace.origin.options.s3 import s3_options
from millrace.origin.options.store import StoreOptions

__all__ = ["StoreOptions", "azure_options", "gcs_options", "s3_options"]
