"""What the cases that read from S3 share: a bucket, the clients that contenders use directly, what crossed the region."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

BUCKET = "data"

_UPLOAD_THREADS = 16


def fill(s3: S3Server, objects: Iterable[tuple[str, bytes | Path]]) -> None:
    """Put objects (key, and content or the file with it) straight to the server: the region is for the contenders."""
    s3.create_bucket(BUCKET)
    store = obstore_client(s3.target_options)
    with ThreadPoolExecutor(_UPLOAD_THREADS) as pool:
        for _ in pool.map(lambda item: store.put(*item), objects):
            pass


def obstore_client(options: Mapping[str, Any]) -> Any:
    """obstore's client of the bucket, with the options that the file systems get."""
    import obstore.store

    return obstore.store.S3Store(
        BUCKET,
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region="us-east-1",
        client_options={"allow_http": True},
    )


def pyarrow_client(options: Mapping[str, Any]) -> Any:
    """pyarrow's S3 file system, with the options that the file systems get."""
    import pyarrow.fs

    return pyarrow.fs.S3FileSystem(
        access_key=options["key"],
        secret_key=options["secret"],
        endpoint_override=urllib.parse.urlsplit(options["endpoint_url"]).netloc,
        scheme="http",
        region="us-east-1",
    )


def through(region: EmulatedRegion, s3: S3Server) -> dict[str, Any]:
    """The options of a file system that reaches the server through the region."""
    return {**s3.target_options, "endpoint_url": region.endpoint_url}


def probe_of(region: EmulatedRegion) -> Callable[[], Mapping[str, float]]:
    """Counts what the bucket has served through the region, for `Prepared`."""

    def probe() -> dict[str, float]:
        seen = region.stats(prefix=f"/{BUCKET}/")
        return {"origin MB": seen.bytes_down / 1e6, "origin requests": seen.requests}

    return probe
