"""Reads a Hugging Face directory: safetensors files, with or without an index.

The tensors are described by a manifest that is made from the headers of the files, so that everything which reads a
checkpoint reads them too. The format has no checksums: damage of the values can remain undetected.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec.chunks import as_bytes
from millrace.checkpoint.format.inventory import is_named
from millrace.checkpoint.format.manifest import DataFile, Manifest, Shard, TensorEntry
from millrace.checkpoint.format.safetensors import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    FileTensor,
    header_bytes,
    parse_header,
    parse_index,
)
from millrace.checkpoint.format.tables import NO_BASE, chunk_table, item_table
from millrace.checkpoint.storage.base import CheckpointStorage, StoredFile, has_file
from millrace.checkpoint.storage.fetching import ChunkFetcher, ItemRequest
from millrace.checkpoint.storage.storage import LocalStorage, require_unchanged
from millrace.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingError,
    UnsupportedObjectError,
)
from millrace.runtime.pipeline import run_in_order

# One request returns this many bytes of a file: most headers.
_HEAD_BYTES = 64 << 10
# A tensor is read in parts of this size, by several threads.
_PART_BYTES = 1 << 20

# A file of a model in several files, by their number.
_NUMBERED = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors", re.ASCII)
# A file that torch's writer has for each rank. It looks complete when those of the other ranks are missing.
_OF_ONE_RANK = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors", re.ASCII)

_T = TypeVar("_T")


class SafetensorsFiles(NamedTuple):
    """The safetensors files of a directory, pinned to their versions, and the manifest that describes their tensors."""

    manifest: Manifest
    files: tuple[StoredFile, ...]


def read_hugging_face(storage: CheckpointStorage, threads: int, keys: Sequence[str] = ()) -> SafetensorsFiles:
    """Describe the safetensors files of a directory. `keys` are the patterns of the keys to read, as in `select_keys`.

    Uses the index if its files exist, or else `model.safetensors`, or else every safetensors file. Raises
    `CheckpointNotFoundError` when there is none, `CorruptCheckpointError` (also when a numbered one is missing), and
    `UnsupportedObjectError` for a selected tensor of an unknown element type.
    """
    named: dict[str, str] | None = None
    try:
        index = storage.stat(INDEX_NAME)
    except MissingError:
        names = _file_names(storage)
    else:
        named = _checked(storage, INDEX_NAME, lambda: parse_index(_read_index(storage, index)))
        names = sorted(set(named.values()))
    found: dict[str, tuple[int, FileTensor]] = {}
    files: list[StoredFile] = []
    try:
        headers = list(run_in_order(names, lambda name: _read_header(storage, name), threads))
    except CorruptCheckpointError as error:
        is_missing = isinstance(error.__cause__, MissingError)
        if not is_missing or SINGLE_NAME in names or not has_file(storage, SINGLE_NAME):
            raise
        # `save_pretrained` of a model in one file leaves the index of the one before, whose files it removes.
        named, headers = None, [_read_header(storage, SINGLE_NAME)]
    for file, tensors in headers:
        for tensor in tensors:
            if named is not None and named.get(tensor.name) != file.name:
                continue  # transformers ignores it, too
            if tensor.name in found:
                raise CorruptCheckpointError(
                    f"{storage.url}: {files[found[tensor.name][0]].name} and {file.name} both contain {tensor.name!r}",
                    next_step="keep the files of one model in a directory",
                )
            found[tensor.name] = len(files), tensor
        files.append(file)
    missing = [key for key in named or () if key not in found]
    if missing:
        raise CorruptCheckpointError(
            f"{storage.url}: {missing[0]!r} is in the index but not in its file", next_step="load another copy"
        )
    for key, (_, tensor) in found.items():
        if tensor.dtype is None and (not keys or any(is_named(key, pattern) for pattern in keys)):
            raise UnsupportedObjectError(
                f"{key!r} of {storage.url} has the element type {tensor.stored_dtype!r:.40}, which is not supported",
                next_step="leave it out by naming the others",
            )
    return SafetensorsFiles(_manifest(files, list(found.values())), tuple(files))


class SafetensorsFetcher(ChunkFetcher):
    """Fetches the plain bytes of the tensors. Thread-safe."""

    def __init__(self, storage: CheckpointStorage, opened: SafetensorsFiles, threads: int) -> None:
        super().__init__(storage, opened.manifest, threads)
        self._files.update(enumerate(opened.files))

    def fetch(self, requests: Sequence[ItemRequest]) -> None:
        super().fetch(requests)
        if isinstance(self._storage, LocalStorage):
            # A read of a local disk is not pinned to a version, and safetensors have no checksums.
            rows = self._manifest.items["chunk"][[request.item for request in requests if request.runs.nbytes]]
            for number in np.unique(self._manifest.chunks["file"][rows]):
                require_unchanged(self._storage, self._files[int(number)])

    def _decode_one(self, row: int, stored: Buffer, out: np.ndarray[Any, Any], base: memoryview | None) -> None:
        out[:] = as_bytes(stored)


def _manifest(files: Sequence[StoredFile], found: Sequence[tuple[int, FileTensor]]) -> Manifest:
    entries: list[TensorEntry] = []
    items: dict[str, list[int]] = {"chunk": [], "start": [], "nbytes": []}
    rows: dict[str, list[int]] = {"file": [], "offset": [], "raw_bytes": []}
    for number, tensor in found:
        if tensor.dtype is None:
            continue
        shape, nbytes = tensor.shape, tensor.stop - tensor.start
        entries.append(TensorEntry(tensor.name, tensor.dtype, shape, (Shard((0,) * len(shape), shape),)))
        items["chunk"].append(len(rows["file"]) if nbytes else 0)
        items["start"].append(0)
        items["nbytes"].append(nbytes)
        for start in range(tensor.start, tensor.stop, _PART_BYTES):
            rows["file"].append(number)
            rows["offset"].append(start)
            rows["raw_bytes"].append(min(_PART_BYTES, tensor.stop - start))
    nothing = [0] * len(rows["file"])
    return Manifest(
        created=max((file.modified for file in files), default=0.0),
        writer="safetensors",
        files=tuple(DataFile(file.name, file.size) for file in files),
        tensors=tuple(entries),
        blobs=(),
        items=item_table(items),
        chunks=chunk_table(
            {
                **rows,
                "stored_bytes": rows["raw_bytes"],
                "kind": nothing,
                "base": [NO_BASE] * len(nothing),
                "stored_checksum": nothing,
                "raw_checksum": nothing,
            }
        ),
    )


def _file_names(storage: CheckpointStorage) -> list[str]:
    if has_file(storage, SINGLE_NAME):
        return [SINGLE_NAME]
    try:
        names = [name for name in storage.names() if name.endswith(".safetensors")]
    except ConfigurationError:  # a cache cannot list
        names = []
    if not names:
        raise CheckpointNotFoundError(f"{storage.url}: there are no safetensors files", next_step="check the name")
    numbered = Counter(match.groups() for name in names if (match := _NUMBERED.fullmatch(name)))
    for (start, total), count in numbered.items():
        if count != int(total):  # as after a download or an export that was killed
            raise CorruptCheckpointError(
                f"{storage.url}: there are {count} of the {total} files of {start!r}, and no index",
                next_step="load another copy",
            )
    return names


def _read_index(storage: CheckpointStorage, file: StoredFile) -> bytes:
    if file.size > MAX_HEADER_BYTES:
        raise CorruptCheckpointError(f"it is impossibly long ({file.size} bytes)")
    return bytes(memoryview(storage.read(file, 0, file.size)))


def _read_header(storage: CheckpointStorage, name: str) -> tuple[StoredFile, list[FileTensor]]:
    if _OF_ONE_RANK.fullmatch(name):
        raise UnsupportedObjectError(
            f"{storage.url}/{name} has the parts of tensors that one rank had (save_distributed=True)",
            next_step="load the model with torch's HuggingFaceStorageReader, or save it with enable_consolidation=True",
        )
    try:
        file = storage.stat(name)
    except MissingError as error:
        raise CorruptCheckpointError(
            f"{storage.url}: {name} is in the index but missing", next_step="load another copy"
        ) from error
    head = bytes(memoryview(storage.read(file, 0, min(_HEAD_BYTES, file.size))))
    nbytes = _checked(storage, name, lambda: header_bytes(head, file.size))
    if nbytes > len(head):
        head += bytes(memoryview(storage.read(file, len(head), nbytes)))
    return file, _checked(storage, name, lambda: parse_header(head[:nbytes], file.size))


def _checked(storage: CheckpointStorage, name: str, parse: Callable[[], _T]) -> _T:
    """The result of `parse`, whose errors are completed by the name of the file."""
    try:
        return parse()
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{storage.url}/{name}: {error.message}", next_step="load another copy"
        ) from error.__cause__
