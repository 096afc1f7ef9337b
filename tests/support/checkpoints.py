"""Makes small checkpoints without torch: tensors of random bytes, one a data file, in chunks of 4 KiB."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.checkpoint.codec.chunks import Kind, checksum
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.checkpoint.format.manifest import DataFile, Manifest, Shard, TensorEntry, encode_manifest
from millrace.checkpoint.format.slices import box_runs
from millrace.checkpoint.format.tables import NO_BASE, chunk_table, item_table
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.fetching import ChunkFetcher, ItemRequest
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.replicating import Progress, copy_files, publish_checkpoint

KIND = Kind(1, False)
CHUNK_BYTES = 4096


def data_file(directory: Path) -> Path:
    """The only data file of a checkpoint."""
    (path,) = directory.glob("data-*")
    return path


def random_state(*sizes: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def make_checkpoint(
    storage: CheckpointStorage,
    tensors: Sequence[np.ndarray],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    shared: Mapping[int, Manifest] | None = None,
    directory: str = "",
    user: Mapping[str, Any] | None = None,
    publish: bool = True,
) -> Manifest:
    """Save `tensors`, each in its own file. `shared`: those that refer to a sibling `directory`."""
    storage.prepare()
    codec, stem = PlaneCodec(), uuid.uuid4().hex
    files: list[DataFile] = []
    rows: list[dict[str, int]] = []
    items: list[dict[str, int]] = []
    for number, tensor in enumerate(tensors):
        items.append({"chunk": len(rows), "start": 0, "nbytes": tensor.nbytes})
        if shared and number in shared:
            there = shared[number]
            files.append(DataFile(f"../{directory}/{there.files[number].name}", there.files[number].size))
            theirs = np.flatnonzero(there.chunks["file"] == number)
            rows += [
                {**{name: int(there.chunks[name][row]) for name in there.chunks.columns}, "file": number}
                for row in theirs
            ]
            continue
        name, offset = f"data-{stem}-0-{number}.millrace", 0
        with storage.open_writer(name) as writer:
            for start in range(0, tensor.nbytes, chunk_bytes):
                raw = tensor[start : start + chunk_bytes]
                stored = b"".join(codec.encode(raw.data, KIND, None))
                rows.append(
                    {
                        "kind": KIND.code,
                        "file": number,
                        "base": NO_BASE,
                        "raw_bytes": raw.nbytes,
                        "stored_bytes": len(stored),
                        "offset": offset,
                        "stored_checksum": checksum(stored),
                        "raw_checksum": checksum(raw.data),
                    }
                )
                writer.write(stored)
                offset += len(stored)
        files.append(DataFile(name, offset))
    manifest = Manifest(
        created=time.time(),
        writer="test",
        files=tuple(files),
        tensors=tuple(
            TensorEntry(f"w{number}", "uint8", tensor.shape, (Shard((0,), tensor.shape),))
            for number, tensor in enumerate(tensors)
        ),
        blobs=(),
        items=item_table({name: [item[name] for item in items] for name in ("chunk", "start", "nbytes")}),
        chunks=chunk_table({name: [row[name] for row in rows] for name in rows[0]}),
        user=dict(user or {}),
        save_id=stem,
    )
    if publish:
        storage.publish("manifest.millrace", encode_manifest(manifest), replace=False)
    return manifest


def own_files(storage: CheckpointStorage) -> list[str]:
    """The names of its own data files."""
    return [file.name for file in read_manifest(storage).manifest.own_files]


def copy_checkpoint(
    source: CheckpointStorage,
    target: CheckpointStorage,
    *,
    progress: Progress | None = None,
    check: Callable[[], object] = lambda: None,
) -> int:
    """Copy the own data files, then publish the manifest. Returns the bytes that the target did not have."""
    seen: list[int] = []

    def record(done: int, total: int) -> None:
        seen.append(done)
        if progress is not None:
            progress(done, total)

    copy_files(source, target, own_files(source), progress=record)
    publish_checkpoint(source, target, check)
    return seen[-1] - seen[0]


def load_all(storage: CheckpointStorage) -> list[np.ndarray]:
    """Every tensor, verified."""
    manifest = read_manifest(storage).manifest
    out = [np.empty(entry.shape, dtype=np.uint8) for entry in manifest.tensors]
    requests = [
        ItemRequest(number, box_runs(array.shape, (0,), array.shape, 1), array) for number, array in enumerate(out)
    ]
    ChunkFetcher(storage, manifest, 2).fetch(requests)
    return out


def assert_same_arrays(loaded: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(loaded) == len(expected)
    for one, other in zip(loaded, expected, strict=True):
        assert np.array_equal(one, other)
