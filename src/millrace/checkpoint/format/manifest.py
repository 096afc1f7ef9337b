"""The manifest: what a checkpoint contains and where each byte of it lies. Pure; no torch, no I/O, never a pickle.

`docs/reference/checkpoint-format.md` describes it byte by byte. A manifest read from outside is treated as hostile: the
checksum is verified first, then every length, index and name, before anything is allocated by them.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import zstandard
from typing_extensions import Buffer

from millrace.checkpoint.codec.planes import MAX_CHUNK_BYTES, OPAQUE, Kind, checksum
from millrace.checkpoint.format.tables import CHUNK_COLUMNS, ITEM_COLUMNS, NO_BASE, Table
from millrace.checkpoint.format.values import pack_value, unpack_value
from millrace.errors import CorruptCheckpointError, MillraceError, UnsupportedFormatError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.millrace"
MAX_MANIFEST_BYTES = 256 << 20
"""A stored manifest is no longer than this; its body decompresses to at most four times as much."""
MAX_BLOB_BYTES = 1 << 30
"""An object that is no tensor is no longer than this: a reader allocates its length before the first byte is there."""
MAX_CHUNK_OVERHEAD_BYTES = 64
"""A chunk as the codec makes it is at most so much longer than what it holds."""

_MAGIC = b"\x89MILLRC\n"
_HEADER = struct.Struct("<8sIIQQ")
_SECTION = struct.Struct("<4sQ")
_CHECKSUM = struct.Struct("<Q")
# A body beyond the first number of bytes is at most so many times as long as stored (real ones: 10 to 70 times): what
# a hostile manifest makes a reader allocate stays in proportion to what somebody had to store.
_BODY_BYTES, _BODY_RATIO = 4 << 20, 100
_KNOWN_FEATURES = frozenset({"delta", "transforms"})
# What stream extensions may add to a chunk, beside an eighth of it.
_TRANSFORM_BYTES, _MAX_TRANSFORMS = 4096, 16
# A data file of this checkpoint, or of a sibling directory: a hostile name must not reach anything else.
_FILE_NAME = re.compile(r"(?:\.\./(?!\.{1,2}/)[^/\0]{1,255}/)?data-[0-9a-z-]{1,100}\.millrace", re.ASCII)

_FLOATS = {2: ("bfloat16", "float16"), 4: ("float32",), 8: ("float64",)}
_FLOATS8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")

DTYPES: Mapping[str, tuple[int, Kind]] = {
    **{name: (width, Kind(width, True)) for width, names in _FLOATS.items() for name in names},
    **{name: (1, Kind(1, True)) for name in _FLOATS8},
    **{f"int{8 * width}": (width, Kind(width, False)) for width in (1, 2, 4, 8)},
    **{f"uint{8 * width}": (width, Kind(width, False)) for width in (1, 2, 4, 8)},
    "bool": (1, OPAQUE),
    "complex32": (4, Kind(2, True)),
    "complex64": (8, Kind(4, True)),
    "complex128": (16, Kind(8, True)),
}
"""Every element type that can be stored: bytes an element, and how the codec sees it."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of packed chunks, beside the manifest or (`../name/...`) in a sibling checkpoint. `size` in bytes."""

    name: str
    size: int


class Shard(NamedTuple):
    """A box of a tensor that is stored as one item: where it begins and how long it is, in elements per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Properties(NamedTuple):
    """What torch keeps about a tensor besides its values; names as in torch, without `torch.`."""

    layout: str = "strided"
    requires_grad: bool = False
    memory_format: str = "contiguous_format"
    pin_memory: bool = False


class TensorEntry(NamedTuple):
    """One tensor: its key in the flattened state dict, element type, global shape, and the shards that hold it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    properties: Properties = Properties()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint. Items are numbered through the shards of `tensors` in order, then `blobs`.

    `created` is in Unix seconds. `planner_data` is made of JSON values, tuples and bytes. `user` is the caller's own.
    `save_id` is unlike that of any other save. `replaces` is the checksum of the metadata of torch's own writer that
    this checkpoint was saved over: other metadata beside the manifest is of a later save. `transforms` describes the
    stream extensions that every stored chunk went through, in the order in which a reader undoes them.
    """

    created: float
    writer: str
    files: tuple[DataFile, ...]
    tensors: tuple[TensorEntry, ...]
    blobs: tuple[str, ...]
    items: Table
    chunks: Table
    planner_data: Any = None
    user: Mapping[str, Any] = field(default_factory=dict)
    save_id: str = ""
    replaces: str | None = None
    transforms: tuple[str, ...] = ()


# --- writing --------------------------------------------------------------------------------------


def encode_manifest(manifest: Manifest) -> bytes:
    """Serialise. Raises `UnsupportedObjectError` for planner or user data that is not plain."""
    dtypes = sorted({entry.dtype for entry in manifest.tensors})
    properties = list(dict.fromkeys(entry.properties for entry in manifest.tensors))
    dtype_numbers = {name: number for number, name in enumerate(dtypes)}
    property_numbers = {value: number for number, value in enumerate(properties)}
    features = ["delta"] if (manifest.chunks["base"] != NO_BASE).any() else []
    if manifest.transforms:
        features.append("transforms")
    meta = {
        "created": manifest.created,
        "writer": manifest.writer,
        "features": features,
        "files": [[file.name, file.size] for file in manifest.files],
        "dtypes": dtypes,
        "properties": [[p.layout, p.requires_grad, p.memory_format, p.pin_memory] for p in properties],
        "tensors": [
            [
                entry.key,
                dtype_numbers[entry.dtype],
                entry.shape,
                property_numbers[entry.properties],
                None if _is_whole(entry) else [[shard.offsets, shard.sizes] for shard in entry.shards],
            ]
            for entry in manifest.tensors
        ],
        "blobs": manifest.blobs,
        "planner": pack_value(manifest.planner_data, "the planner's data"),
        "user": pack_value(dict(manifest.user), "user metadata"),
        "save": manifest.save_id,
        "replaces": manifest.replaces,
        "transforms": manifest.transforms,
    }
    sections = {
        b"META": json.dumps(meta, separators=(",", ":")).encode("ascii"),
        b"ITEM": manifest.items.to_bytes(),
        b"CHNK": manifest.chunks.to_bytes(),
    }
    body, stored = _compress(sections)
    if len(body) > _body_limit(len(stored)):
        # Noise, which every reader skips, keeps an extremely regular manifest under the ratio that readers allow.
        body, stored = _compress({**sections, b"NOIS": os.urandom(len(body) // (_BODY_RATIO // 2))})
    head = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(stored), len(body))
    return head + stored + _CHECKSUM.pack(checksum(head + stored))


def _compress(sections: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    body = b"".join(part for tag, data in sections.items() for part in (_SECTION.pack(tag, len(data)), data))
    return body, zstandard.ZstdCompressor(level=3).compress(body)


def _body_limit(stored_bytes: int) -> int:
    return min(4 * MAX_MANIFEST_BYTES, max(_BODY_BYTES, _BODY_RATIO * stored_bytes))


def _is_whole(entry: TensorEntry) -> bool:
    shards = entry.shards
    return len(shards) == 1 and shards[0].sizes == entry.shape and not any(shards[0].offsets)


# --- reading --------------------------------------------------------------------------------------


def decode_manifest(data: Buffer) -> Manifest:
    """Read a manifest, checking all of it.

    Raises `UnsupportedFormatError` for an intact manifest of a newer version, `CorruptCheckpointError` otherwise.
    """
    view = memoryview(data).cast("B")
    if len(view) < _HEADER.size + _CHECKSUM.size or bytes(view[:8]) != _MAGIC:
        raise CorruptCheckpointError("not a manifest")
    content = view[: -_CHECKSUM.size]
    # The checksum comes first, so that a damaged version number is not mistaken for a newer format.
    if _CHECKSUM.unpack(view[-_CHECKSUM.size :])[0] != checksum(content):
        raise CorruptCheckpointError("the manifest's checksum does not match")
    _, version, _, stored_bytes, body_bytes = _HEADER.unpack_from(content)
    if version != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"the checkpoint has format version {version}, and this Millrace reads version {FORMAT_VERSION}",
            next_step="install a newer Millrace",
        )
    if stored_bytes != len(content) - _HEADER.size or body_bytes > _body_limit(stored_bytes):
        raise CorruptCheckpointError("the manifest's lengths are wrong")
    try:
        return _decode_body(_decompress(content[_HEADER.size :], body_bytes))
    except MillraceError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
        raise CorruptCheckpointError(f"the manifest's body is malformed ({type(error).__name__})") from error


def _decompress(stored: memoryview, nbytes: int) -> memoryview:
    try:
        # The decompressor allocates what the frame declares, so the declaration is checked first.
        if zstandard.frame_content_size(stored) == nbytes:
            return memoryview(zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise CorruptCheckpointError("the manifest's body does not decompress") from error
    raise CorruptCheckpointError("the manifest's body has another length than declared")


def _decode_body(body: memoryview) -> Manifest:
    sections: dict[bytes, memoryview] = {}
    position = 0
    while position < len(body):
        tag, nbytes = _SECTION.unpack_from(body, position)
        position += _SECTION.size
        if nbytes > len(body) - position:
            raise CorruptCheckpointError("a section of the manifest is cut off")
        sections[tag] = body[position : position + nbytes]
        position += nbytes
    meta = json.loads(bytes(sections[b"META"]))
    unknown = sorted(set(meta["features"]) - _KNOWN_FEATURES)
    if unknown:
        raise UnsupportedFormatError(
            f"the checkpoint uses features that this Millrace does not know: {', '.join(unknown)}",
            next_step="install a newer Millrace",
        )
    properties = [_read_properties(*row) for row in meta["properties"]]
    manifest = Manifest(
        created=float(meta["created"]),
        writer=str(meta["writer"]),
        files=tuple(DataFile(str(name), _natural(size)) for name, size in meta["files"]),
        tensors=tuple(_read_tensors(meta["tensors"], meta["dtypes"], properties)),
        blobs=tuple(_text(key) for key in meta["blobs"]),
        items=Table.from_bytes(ITEM_COLUMNS, sections[b"ITEM"]),
        chunks=Table.from_bytes(CHUNK_COLUMNS, sections[b"CHNK"]),
        planner_data=unpack_value(meta["planner"]),
        user=_mapping(unpack_value(meta["user"])),
        save_id=str(meta.get("save", "")),
        replaces=None if meta.get("replaces") is None else _text(meta["replaces"]),
        transforms=tuple(_text(descriptor) for descriptor in meta.get("transforms", ())),
    )
    if len(manifest.transforms) > _MAX_TRANSFORMS:
        raise CorruptCheckpointError("the chunks went through impossibly many extensions")
    _check_keys_and_files(manifest)
    _check_chunks(manifest)
    _check_items(manifest)
    return manifest


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise CorruptCheckpointError(f"{value!r:.40} is no size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CorruptCheckpointError(f"{value!r:.40} is no key")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CorruptCheckpointError("the manifest's user metadata is no mapping")
    return value


def _box(values: Sequence[Any], rank: int) -> tuple[int, ...]:
    if len(values) != rank:
        raise CorruptCheckpointError("a shard has another number of dimensions than its tensor")
    return tuple(_natural(value) for value in values)


def _read_properties(layout: Any, requires_grad: Any, memory_format: Any, pin_memory: Any) -> Properties:
    return Properties(_text(layout), bool(requires_grad), _text(memory_format), bool(pin_memory))


def _read_tensors(rows: Any, dtypes: Any, properties: Sequence[Properties]) -> Iterator[TensorEntry]:
    # Most of tens of thousands of tensors are whole, and of few shapes.
    wholes: dict[Any, tuple[Shard, ...]] = {}
    for key, dtype, shape, number, shards in rows:
        boxes = wholes.get(tuple(shape))
        if boxes is None:
            rank = len(shape)
            boxes = wholes[tuple(shape)] = (Shard((0,) * rank, _box(shape, rank)),)
        size = boxes[0].sizes
        if shards is not None:
            boxes = _read_shards(key, shards, size)
        name = dtypes[_natural(dtype)]
        if name not in DTYPES:
            raise CorruptCheckpointError(f"unknown element type {name!r:.40}")
        yield TensorEntry(_text(key), name, size, boxes, properties[_natural(number)])


def _read_shards(key: Any, shards: Any, size: tuple[int, ...]) -> tuple[Shard, ...]:
    boxes = tuple(Shard(_box(offsets, len(size)), _box(sizes, len(size))) for offsets, sizes in shards)
    for box in boxes:
        if any(offset + length > whole for offset, length, whole in zip(box.offsets, box.sizes, size, strict=True)):
            raise CorruptCheckpointError(f"a shard of {key!r:.100} lies outside its tensor")
    return boxes


def _check_keys_and_files(manifest: Manifest) -> None:
    keys = [entry.key for entry in manifest.tensors] + list(manifest.blobs)
    if len(set(keys)) != len(keys):
        raise CorruptCheckpointError("a key appears twice")
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise CorruptCheckpointError(f"{file.name!r:.100} is no name of a data file")


def _check_chunks(manifest: Manifest) -> None:
    chunks, rows = manifest.chunks, np.arange(len(manifest.chunks), dtype=np.uint32)
    if not len(chunks):
        return
    if chunks["file"].max() >= len(manifest.files):
        raise CorruptCheckpointError("a chunk lies in a file that the manifest does not list")
    sizes = np.array([file.size for file in manifest.files], dtype=np.uint64)[chunks["file"]]
    stored = chunks["stored_bytes"].astype(np.uint64)
    if (stored > sizes).any() or (chunks["offset"] > sizes - np.minimum(stored, sizes)).any():
        raise CorruptCheckpointError("a chunk lies outside its file")
    kinds = [Kind.from_code(int(code)) for code in np.unique(chunks["kind"])]
    widths = np.zeros(256, dtype=np.uint32)
    for kind in kinds:
        widths[kind.code] = kind.width
    raw = chunks["raw_bytes"]
    # No encoder makes a chunk longer than its header and the plain bytes.
    longest = raw.astype(np.uint64) + np.uint64(MAX_CHUNK_OVERHEAD_BYTES)
    if manifest.transforms:
        longest += (longest >> np.uint64(3)) + np.uint64(_TRANSFORM_BYTES)
    if (raw > MAX_CHUNK_BYTES).any() or (raw % widths[chunks["kind"]]).any() or (stored > longest).any():
        raise CorruptCheckpointError("a chunk has an impossible length")
    delta = chunks["base"] != NO_BASE
    base = chunks["base"][delta]
    if (base >= rows[delta]).any() or (raw[base] != raw[delta]).any():
        raise CorruptCheckpointError("a delta chunk has an impossible base")
    if (chunks["kind"][base] != chunks["kind"][delta]).any():
        raise CorruptCheckpointError("a delta chunk has a base of another kind")


def _check_items(manifest: Manifest) -> None:
    """Every item must lie inside consecutive chunks of its own kind, and be as long as its shape says."""
    expected_bytes: list[int] = []
    expected_kind: list[int] = []
    codes = {name: (itemsize, kind.code) for name, (itemsize, kind) in DTYPES.items()}
    for entry in manifest.tensors:
        itemsize, code = codes[entry.dtype]
        for shard in entry.shards:
            expected_bytes.append(math.prod(shard.sizes) * itemsize)
            expected_kind.append(code)
    items, chunks = manifest.items, manifest.chunks
    tensor_items = len(expected_bytes)
    if len(items) != tensor_items + len(manifest.blobs):
        raise CorruptCheckpointError("the number of items does not match the keys")
    if (items["nbytes"][:tensor_items] != np.array(expected_bytes, dtype=np.uint64)).any():
        raise CorruptCheckpointError("an item's length does not match its shape")
    if (items["nbytes"][tensor_items:] > MAX_BLOB_BYTES).any():
        raise CorruptCheckpointError("an object is impossibly long")
    used = items["nbytes"] > 0
    if not used.any():
        return
    first = items["chunk"][used].astype(np.int64)
    if first.max() >= len(chunks):
        raise CorruptCheckpointError("an item begins in a chunk that does not exist")
    ends = np.cumsum(chunks["raw_bytes"], dtype=np.uint64)
    start = items["start"][used].astype(np.uint64)
    begin = ends[first] - chunks["raw_bytes"][first] + start
    if (start >= chunks["raw_bytes"][first]).any() or (items["nbytes"][used] > ends[-1] - begin).any():
        raise CorruptCheckpointError("an item lies outside its chunks")
    last = np.searchsorted(ends, begin + items["nbytes"][used])
    kind_column = chunks["kind"]
    changes = np.concatenate([[0], np.cumsum(kind_column[1:] != kind_column[:-1])])
    kinds = np.array(expected_kind + [OPAQUE.code] * len(manifest.blobs), dtype=np.uint8)[used]
    if (kind_column[first] != kinds).any() or (changes[first] != changes[last]).any():
        raise CorruptCheckpointError("an item lies in chunks of another kind")
