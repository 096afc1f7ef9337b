"""A checkpoint below a prefix of an object store, behind `millrace.origin`."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from typing_extensions import Buffer

from millrace.checkpoint.arguments import ReadThroughMode
from millrace.checkpoint.storage.base import StoredFile, contains
from millrace.cluster.read_through import ReadThrough
from millrace.errors import (
    ChangedError,
    ConfigurationError,
    MissingError,
    ObjectExistsError,
    OutcomeUnknownError,
    RetryableError,
)
from millrace.origin import ObjectInfo, ObjectWriter, Origin, Readable

# Attempts of a conditional PUT without a response while the object is missing. The client retries each attempt as well.
_PUBLISH_ATTEMPTS = 3
_EXACT_VERSIONS = frozenset({"s3", "az", "gs", "hf"})
# Data files, whose names are unique to a save. Manifests and metadata are read from the storage.
_DATA_FILE = re.compile(r"(?:^|/)(?:data-[^/]*\.millrace|[^/]*\.(?:distcp|safetensors))$")


class ObjectStorage:
    """A prefix of an object store. Reading needs a `Readable`. Writing and listing need an `Origin`.

    `cached` reads data files, and drops those that are deleted.
    """

    def __init__(self, url: str, origin: Readable, prefix: str, cached: ReadThrough | None = None) -> None:
        self._url = url.rstrip("/")
        self._origin = origin
        self._prefix = prefix.rstrip("/")
        self._cached = cached

    @property
    def url(self) -> str:
        return self._url

    def prepare(self) -> None:
        self._whole()

    def open_writer(self, name: str) -> ObjectWriter:
        return self._whole().open_writer(self._key(name))

    def publish(self, name: str, data: Buffer, *, replace: bool) -> None:
        # The response to a PUT can get lost after the store has written the object. A retry of a conditional PUT is then
        # refused. So read the object back and compare it. `data` is unique to this save.
        for attempt in range(1, _PUBLISH_ATTEMPTS + 1):
            try:
                self._whole().put(self._key(name), data, if_absent=not replace)
                return
            except ObjectExistsError:
                if self._holds(name, data):
                    return
                raise
            except RetryableError as error:
                if self._holds(name, data, lost=error):
                    return
                if replace or attempt == _PUBLISH_ATTEMPTS:
                    raise self._unknown(name, error) from error

    def stat(self, name: str) -> StoredFile:
        return self._describe(name, self._origin.head(self._key(name)))

    def read(self, file: StoredFile, start: int, stop: int) -> Buffer:
        key = self._key(file.name)
        if self._cached is not None and _DATA_FILE.search(key):
            return self._cached.read(ObjectInfo(key, file.size, file.version, file.modified), start, stop)
        return self._origin.read(key, start, stop, version=file.version)

    def names(self) -> Sequence[str]:
        return [file.name for file in self.files()]

    def files(self) -> Sequence[StoredFile]:
        objects = self._whole().list_level(self._prefix).objects
        return [self._describe(posixpath.basename(info.key), info) for info in objects]

    def delete(self, names: Sequence[str]) -> None:
        keys = [self._key(name) for name in names]
        self._whole().delete(keys)
        files = [key for key in keys if _DATA_FILE.search(key)]
        if self._cached is not None and files:
            self._cached.drop(files)

    def _holds(self, name: str, data: Buffer, lost: RetryableError | None = None) -> bool:
        """Whether the file `name` contains exactly `data`. `lost` is the error of a PUT without response."""
        try:
            return contains(self, name, data)
        except (MissingError, ChangedError):
            return False
        except RetryableError as error:
            raise self._unknown(name, lost or error) from (lost or error)

    def _unknown(self, name: str, cause: RetryableError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{name}: unknown whether it was written ({cause.message})",
            next_step="check the file when the storage responds again, and save again",
        )

    @staticmethod
    def _describe(name: str, info: ObjectInfo) -> StoredFile:
        return StoredFile(name, info.size, info.version, info.modified)

    def _key(self, name: str) -> str:
        if name.startswith("../"):
            return posixpath.join(posixpath.dirname(self._prefix), name[3:])
        return f"{self._prefix}/{name}"

    def _whole(self) -> Origin:
        if not isinstance(self._origin, Origin):
            raise ConfigurationError(f"{self._origin.identity} can only be read", next_step="write without `origin=`")
        return self._origin


def cached_reads(origin: Origin, mode: ReadThroughMode) -> ReadThrough | None:
    """Reads data files of one checkpoint through the cache of a cluster. None for the mode `"none"`.

    With `"auto"` it has an effect for object stores only: other storages have no exact versions.
    """
    if mode == "none" or (mode == "auto" and origin.identity.partition("+")[0] not in _EXACT_VERSIONS):
        return None
    return ReadThrough(origin, required=mode == "cluster")
