"""Translates the options that users pass to s3fs, adlfs and gcsfs into those of obstore. Pure; one module per scheme.

An option that is not in a scheme's table is an error that lists the known ones: a misspelt `secret` must not turn into an
anonymous request.
"""

from __future__ import annotations

from millrace.origin.options.azure import azure_options
from millrace.origin.options.gcs import gcs_options
from millrace.origin.options.s3 import s3_options
from millrace.origin.options.store import StoreOptions

__all__ = ["StoreOptions", "azure_options", "gcs_options", "s3_options"]
