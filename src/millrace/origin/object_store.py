"""Origins through obstore: S3 and compatible services, Azure, Google Cloud Storage, and local files.

obstore is the fastest measured client, releases the GIL, and supports `If-Match`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from typing_extensions import Buffer

from millrace.errors import (
    DeniedError,
    IsDirectoryError,
    ObjectNotFoundError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.base import byte_view
from millrace.origin.keys import bucket_word, check_place
from millrace.origin.obstore_library import obstore_library
from millrace.origin.reachability import first_contact
from millrace.origin.side_by_side import side_by_side
from millrace.origin.store_listing import StoreListing
from millrace.origin.upload import PART_BYTES, ObjectUpload

_UPLOAD_CONCURRENCY = 4
_DELETE_THREADS = 8
_DELETE_KEYS = 1000  # of one request
_URL_LASTS = timedelta(minutes=1)


class ObjectStoreOrigin(StoreListing):
    """One storage system (scheme, endpoint, credentials) with all its buckets.

    Every process looks for the credentials that are not among the options. See `BaseOrigin` for threads, forks and pickles.
    """

    def signed_url(self, key: str) -> str | None:
        """A URL for a GET of the object within a minute without credentials: a secret. None if it cannot be signed."""
        if self._scheme == "file":
            return None

        def sign(client: Any, path: str) -> str:
            url: str = obstore_library().sign(client, "GET", path, _URL_LASTS)
            return url

        try:
            return self._request(key, sign)
        except (ObjectNotFoundError, OriginUnavailableError, UsageError):
            return None  # without credentials, or with credentials that cannot sign

    # --- writing ----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._put(key, data, mode="create" if if_absent else "overwrite", streams=False)

    def open_writer(self, key: str) -> ObjectUpload:
        self._check_may_write(key)
        self._locate(key)  # reports an invalid key now instead of at the end
        self._check_place(key)

        def upload(parts: Iterator[Buffer]) -> None:
            client, path = self._locate(key, streams=True)
            if cause := first_contact(self._clients.address) if self._clients.address else None:
                raise cause.error(f"{self._url(key)}: {self.identity} cannot be reached")
            with self._translated(key):
                client.put(
                    path,
                    parts,
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=_UPLOAD_CONCURRENCY,
                )

        return ObjectUpload(key, upload, lambda data: self._put(key, data, mode="overwrite", streams=True))

    def _put(self, key: str, data: Buffer, *, mode: str, streams: bool) -> None:
        self._check_may_write(key)
        # obstore accepts one-dimensional uint8 buffers only.
        body = byte_view(data)

        def request(client: Any, path: str) -> None:
            self._check_place(key)
            client.put(path, body, mode=mode, use_multipart=False)

        self._request(key, request, streams=streams)

    def delete(self, keys: Sequence[str]) -> None:
        by_bucket: dict[str, list[str]] = {}
        for key in keys:
            by_bucket.setdefault(self._bucket(key), []).append(key)
        for members in by_bucket.values():
            self._check_may_write(members[0])
            paths = {key: self._locate(key)[1] for key in members}  # reports invalid keys before any removal
            if self._scheme == "s3":
                for start in range(0, len(members), _DELETE_KEYS):
                    self._delete_together([paths[key] for key in members[start : start + _DELETE_KEYS]], members[start])
            elif self._scheme == "file":
                for key in members:
                    self._delete_one(key)
            else:  # requests for many objects stop at the first missing one
                side_by_side(self._delete_one, members, _DELETE_THREADS, "millrace-delete")

    def _delete_together(self, paths: Sequence[str], key: str) -> None:
        """Remove objects of the bucket of `key` with one request."""

        def request(client: Any, _: str) -> None:
            client.delete(paths)

        self._retrying(key, lambda: self._request(key, request))

    def _delete_one(self, key: str) -> None:
        def request(client: Any, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                client.delete(path)

        self._retrying(key, lambda: self._request(key, request))

    def _check_may_write(self, key: str) -> None:
        if not self._clients.may_write:
            raise DeniedError(
                f"{self._url(key)} cannot be written without credentials", next_step="remove the option 'anon'"
            )

    def _check_place(self, key: str) -> None:
        if self._scheme == "file":
            check_place("/" + key.strip("/"))
        elif "/" not in key.strip("/"):  # as a request, this would create the bucket
            raise IsDirectoryError(
                f"{self._url(key)} is a whole {bucket_word(self._scheme)}", next_step="name an object in it"
            )
