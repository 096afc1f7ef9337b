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
    MillraceError,
    ObjectNotFoundError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.keys import bucket_word, check_place
from millrace.origin.obstore_library import obstore_library
from millrace.origin.protocol import ObjectInfo
from millrace.origin.reachability import first_contact
from millrace.origin.side_by_side import side_by_side
from millrace.origin.store_access import MADE_UP
from millrace.origin.store_listing import StoreListing
from millrace.origin.translation import is_outside
from millrace.origin.upload import PART_BYTES, ObjectUpload

_UPLOAD_CONCURRENCY = 4
_DELETE_THREADS = 8
_DELETE_KEYS = 1000  # of one request
_URL_LASTS = timedelta(minutes=1)


def _is_strong(version: str) -> bool:
    """Whether a version can be sent as `If-Match`: a weak ETag never matches, and a made-up version is not an ETag."""
    return not version.startswith(("W/", MADE_UP))


class ObjectStoreOrigin(StoreListing):
    """One storage system (scheme, endpoint, credentials) with all its buckets.

    Every process looks for the credentials that are not among the options. See `BaseOrigin` for threads, forks and pickles.
    """

    # --- reading ----------------------------------------------------------------------------------

    def read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        options: dict[str, Any] = {"range": (start, stop)}
        if version and _is_strong(version):
            options["if_match"] = version

        def request(client: Any, path: str) -> tuple[Any, Buffer] | Exception:
            try:
                result = obstore_library().get(client, path, options=options)
            except obstore_library().exceptions.GenericError as error:
                if is_outside(error) or self._scheme == "file":
                    refused: Exception = error
                    return refused  # another request shows whether it is behind the end
                raise
            # Also after a precondition, which a proxy may have dropped.
            if version and not _is_version(self._info(key, result.meta).version, version):
                raise self._overwritten(key)
            return result.meta, result.bytes()

        answer = self._request(key, request)
        if isinstance(answer, Exception):
            info = self.head(key)
            if start >= info.size:
                raise self._range_error(info, start, stop, version) from answer
            with self._translated(key):
                raise answer
        meta, data = answer
        got = len(memoryview(data))
        if got != stop - start:
            if meta["size"] < stop and got == meta["size"] - start:
                raise self._range_error(self._info(key, meta), start, stop, version)
            raise OriginUnavailableError(
                f"{self._url(key)} answered {got} bytes for the range [{start}, {stop})",
                next_step="read again; if it persists, a proxy in between truncates bodies",
            )
        return data

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

    def _range_error(self, info: ObjectInfo, start: int, stop: int, version: str | None) -> MillraceError:
        """The error for a range that ends past the object's end: the object was longer before, or never."""
        if version and version != info.version:
            return self._overwritten(info.key)
        return self._outside(info.key, start, stop, info.size)

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
                obstore_library().put(
                    client,
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
        body = memoryview(data).cast("B")

        def request(client: Any, path: str) -> None:
            self._check_place(key)
            obstore_library().put(client, path, body, mode=mode, use_multipart=False)

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
            obstore_library().delete(client, paths)

        self._retrying(key, lambda: self._request(key, request))

    def _delete_one(self, key: str) -> None:
        def request(client: Any, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore_library().delete(client, path)

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


def _is_version(answered: str, wanted: str) -> bool:
    """Whether a response has the wanted version. A proxy may make an ETag weak without changing a byte."""
    return answered == wanted or (_is_strong(wanted) and answered == f"W/{wanted}")
