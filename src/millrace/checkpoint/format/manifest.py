"""The manifest: the content of a checkpoint and the location of every byte. Pure; no torch, no I/O, never a pickle.

`docs/reference/checkpoint-format.md` describes it byte by byte. `decode_manifest` treats its input as hostile: it
verifies the checksum first, then every length, index and name, before it allocates memory for them.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Buffer

from millrace.checkpoint.codec import zstd
from millrace.checkpoint.codec.chunks import MAX_CHUNK_BYTES, MAX_CHUNK_OVERHEAD_BYTES, OPAQUE, Kind, checksum
from millrace.checkpoint.format.tables import CHUNK_COLUMNS, ITEM_COLUMNS, NO_BASE, Table
from millrace.errors import CorruptCheckpointError, MillraceError, UnsupportedFormatError, UnsupportedObjectError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.millrace"
MAX_MANIFEST_BYTES = 256 << 20
"""The maximum length of a stored manifest. Its body decompresses to at most four times as much."""
MAX_BLOB_BYTES = 1 << 30
"""The maximum length of an object that is not a tensor. A reader allocates this memory before it reads the object."""
MAX_RECIPE_BYTES = 1 << 20
"""The maximum length of the recipe of a wrapper tensor. A reader reads all recipes of a load at once."""

_LATEST = 253402300799.0  # the last second of the year 9999
_MAGIC = b"\x89MILLRC\n"
_HEADER = struct.Struct("<8sIIQQ")
_SECTION = struct.Struct("<4sQ")
_CHECKSUM = struct.Struct("<Q")
# A body longer than the first number of bytes is at most this many times as long as stored (in practice 10 to 70 times).
# So the memory that a hostile manifest makes a reader allocate is proportional to its stored size.
_BODY_BYTES, _BODY_RATIO = 4 << 20, 100
_KNOWN_FEATURES = frozenset({"delta", "sparse", "transforms", "wrapped"})
# Stream extensions may add this many bytes to a chunk, and an eighth of its length.
_TRANSFORM_BYTES, _MAX_TRANSFORMS = 4096, 16
# A data file in this directory or in a sibling directory. A hostile name must not match any other file.
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
"""Every supported element type: bytes per element, and the kind for the codec."""


def is_convertible(dtype: str) -> bool:
    """Whether torch converts an element type to and from other floating-point ones. Not complex numbers, and not
    `float4_e2m1fn_x2`, which has two numbers per element.
    """
    return dtype.startswith(("float", "bfloat")) and dtype != "float4_e2m1fn_x2"


def longest_stored(raw_bytes: Any, *, is_extended: bool) -> Any:
    """The maximum length of a stored chunk of `raw_bytes`, a number or an array. `is_extended`: with stream extensions."""
    # A chunk is never longer than its header and its plain bytes.
    longest = raw_bytes + MAX_CHUNK_OVERHEAD_BYTES
    return longest + (longest >> 3) + _TRANSFORM_BYTES if is_extended else longest


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of packed chunks, in the directory of the manifest or (`../name/...`) in a sibling. `size` in bytes."""

    name: str
    size: int


class Shard(NamedTuple):
    """A box of a tensor that is stored as one item: offsets and sizes in elements per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Properties(NamedTuple):
    """Torch's properties of a tensor besides its values. Names as in torch, without `torch.`."""

    layout: str = "strided"
    requires_grad: bool = False
    memory_format: str = "contiguous_format"
    pin_memory: bool = False


class TensorEntry(NamedTuple):
    """One tensor: its key in the flattened state dict, element type, global shape, and its shards."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    properties: Properties = Properties()


class WrappedEntry(NamedTuple):
    """A wrapper tensor, as described by the planner of the save.

    `parts` has, for each shard, the key of its recipe (one of the blobs) and the keys of its plain tensors.
    """

    tensor: TensorEntry
    parts: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def part_keys(self) -> tuple[str, ...]:
        """The keys of all recipes and plain tensors."""
        return tuple(key for recipe, leaves in self.parts for key in (recipe, *leaves))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint. Items are numbered: the shards of `tensors` in order, then `blobs`.

    `tensors` and `blobs` contain the parts of `wrapped`.

    `created` is in Unix seconds. `planner_data` consists of JSON values, tuples and bytes. `user` is data of the caller.
    `save_id` is unique to the save. `replaces` is the checksum of the metadata of torch's own writer that this save
    replaced: any other metadata in the directory is from a later save. `transforms` describes the stream extensions of
    all stored chunks, in the order in which a reader reverses them. `sparse`: whether there may be sparse deltas, which
    older readers cannot decode.
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
    wrapped: tuple[WrappedEntry, ...] = ()
    sparse: bool = False

    @property
    def own_files(self) -> tuple[DataFile, ...]:
        """The data files in the checkpoint's directory. Names of the others begin with `../` and the directory's name."""
        return tuple(file for file in self.files if not file.name.startswith("../"))


# --- writing --------------------------------------------------------------------------------------


def encode_manifest(manifest: Manifest) -> bytes:
    """Serialise a manifest. Raises `UnsupportedObjectError` for planner or user data that is not plain or is too long."""
    described = (*manifest.tensors, *(each.tensor for each in manifest.wrapped))
    dtypes = sorted({entry.dtype for entry in described})
    properties = list(dict.fromkeys(entry.properties for entry in described))
    dtype_numbers = {name: number for number, name in enumerate(dtypes)}
    property_numbers = {value: number for number, value in enumerate(properties)}
    features = ["delta"] if (manifest.chunks["base"] != NO_BASE).any() else []
    if manifest.transforms:
        features.append("transforms")
    if manifest.wrapped:
        features.append("wrapped")
    if manifest.sparse:
        features.append("sparse")

    def row(entry: TensorEntry) -> list[Any]:
        shards = None if _is_whole(entry) else [[shard.offsets, shard.sizes] for shard in entry.shards]
        return [entry.key, dtype_numbers[entry.dtype], entry.shape, property_numbers[entry.properties], shards]

    meta = {
        "created": manifest.created,
        "writer": manifest.writer,
        "features": features,
        "files": [[file.name, file.size] for file in manifest.files],
        "dtypes": dtypes,
        "properties": [[p.layout, p.requires_grad, p.memory_format, p.pin_memory] for p in properties],
        "tensors": [row(entry) for entry in manifest.tensors],
        "blobs": manifest.blobs,
        "planner": pack_value(manifest.planner_data, "the planner's data"),
        "user": pack_value(dict(manifest.user), "user metadata"),
        "save": manifest.save_id,
        "replaces": manifest.replaces,
        "transforms": manifest.transforms,
    }
    if manifest.wrapped:
        meta["wrapped"] = [[*row(each.tensor), each.parts] for each in manifest.wrapped]
    sections = {
        b"META": json.dumps(meta, separators=(",", ":")).encode("ascii"),
        b"ITEM": manifest.items.to_bytes(),
        b"CHNK": manifest.chunks.to_bytes(),
    }
    body, stored = _compress(sections)
    if len(body) > _body_limit(len(stored)):
        # An extremely regular manifest would exceed the ratio that readers accept. Readers skip this section of noise.
        body, stored = _compress({**sections, b"NOIS": os.urandom(len(body) // (_BODY_RATIO // 2))})
    head = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(stored), len(body))
    if len(head) + len(stored) + _CHECKSUM.size > MAX_MANIFEST_BYTES or len(body) > _body_limit(len(stored)):
        raise UnsupportedObjectError(
            f"the manifest would have {len(stored)} bytes, and {len(body)} uncompressed, more than readers accept",
            next_step="store large values as tensors of the state instead of user metadata",
        )
    return head + stored + _CHECKSUM.pack(checksum(head + stored))


def _compress(sections: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    body = b"".join(part for tag, data in sections.items() for part in (_SECTION.pack(tag, len(data)), data))
    return body, zstd.at_level(3).compress(body)


def _body_limit(stored_bytes: int) -> int:
    return min(4 * MAX_MANIFEST_BYTES, max(_BODY_BYTES, _BODY_RATIO * stored_bytes))


def _is_whole(entry: TensorEntry) -> bool:
    shards = entry.shards
    return len(shards) == 1 and shards[0].sizes == entry.shape and not any(shards[0].offsets)


# --- reading --------------------------------------------------------------------------------------


def decode_manifest(data: Buffer) -> Manifest:
    """Decode a manifest and check all of it.

    Raises `UnsupportedFormatError` for an intact manifest of a newer version, `CorruptCheckpointError` for any other
    problem.
    """
    view = memoryview(data).cast("B")
    if len(view) < _HEADER.size + _CHECKSUM.size or bytes(view[:8]) != _MAGIC:
        raise CorruptCheckpointError("not a manifest")
    content = view[: -_CHECKSUM.size]
    # Check the checksum first: a damaged version number is not a newer format.
    if _CHECKSUM.unpack(view[-_CHECKSUM.size :])[0] != checksum(content):
        raise CorruptCheckpointError("the manifest does not match its checksum")
    _, version, _, stored_bytes, body_bytes = _HEADER.unpack_from(content)
    if version != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"the checkpoint has format version {version}, and this Millrace reads version {FORMAT_VERSION}",
            next_step="install a newer Millrace",
        )
    if stored_bytes != len(content) - _HEADER.size or body_bytes > _body_limit(stored_bytes):
        raise CorruptCheckpointError("the manifest's lengths are wrong")
    try:
        return _decode_body(memoryview(zstd.decompress(content[_HEADER.size :], body_bytes)))
    except MillraceError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
        raise CorruptCheckpointError(f"the manifest's body is malformed ({type(error).__name__})") from error


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
            f"the checkpoint uses features that this Millrace lacks: {', '.join(unknown)}",
            next_step="install a newer Millrace",
        )
    properties = [_read_properties(*row) for row in meta["properties"]]
    manifest = Manifest(
        created=_time(meta["created"]),
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
        wrapped=tuple(_read_wrapped(meta.get("wrapped", ()), meta["dtypes"], properties)),
        sparse="sparse" in meta["features"],
    )
    if len(manifest.transforms) > _MAX_TRANSFORMS:
        raise CorruptCheckpointError("the chunks have impossibly many extensions")
    _check_keys_and_files(manifest)
    _check_chunks(manifest)
    _check_items(manifest)
    _check_wrapped(manifest)
    return manifest


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise CorruptCheckpointError(f"{value!r:.40} is not a size")
    return value


def _time(value: Any) -> float:
    """A time in Unix seconds that a date can be made of."""
    if type(value) not in (int, float) or not 0 <= value <= _LATEST:
        raise CorruptCheckpointError(f"{value!r:.40} is not a time")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CorruptCheckpointError(f"{value!r:.40} is not a key")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CorruptCheckpointError("the user metadata of the manifest is not a mapping")
    return value


def _box(values: Sequence[Any], rank: int) -> tuple[int, ...]:
    if len(values) != rank:
        raise CorruptCheckpointError("a shard has another number of dimensions than its tensor")
    return tuple(_natural(value) for value in values)


def _read_properties(layout: Any, requires_grad: Any, memory_format: Any, pin_memory: Any) -> Properties:
    return Properties(_text(layout), bool(requires_grad), _text(memory_format), bool(pin_memory))


def _read_wrapped(rows: Any, dtypes: Any, properties: Sequence[Properties]) -> Iterator[WrappedEntry]:
    for *row, parts in rows:
        # Any element type: it is the type of the wrapper, and no chunk has it.
        (entry,) = _read_tensors([row], dtypes, properties, any_dtype=True)
        yield WrappedEntry(entry, tuple((_text(recipe), tuple(map(_text, keys))) for recipe, keys in parts))


def _read_tensors(
    rows: Any, dtypes: Any, properties: Sequence[Properties], *, any_dtype: bool = False
) -> Iterator[TensorEntry]:
    # There may be tens of thousands of tensors. Most are whole, and have few different shapes.
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
        if not any_dtype and name not in DTYPES:
            raise CorruptCheckpointError(f"unknown element type {name!r:.40}")
        yield TensorEntry(_text(key), _text(name), size, boxes, properties[_natural(number)])


def _read_shards(key: Any, shards: Any, size: tuple[int, ...]) -> tuple[Shard, ...]:
    boxes = tuple(Shard(_box(offsets, len(size)), _box(sizes, len(size))) for offsets, sizes in shards)
    for box in boxes:
        if any(offset + length > whole for offset, length, whole in zip(box.offsets, box.sizes, size, strict=True)):
            raise CorruptCheckpointError(f"a shard of {key!r:.100} is outside its tensor")
    return boxes


def _check_keys_and_files(manifest: Manifest) -> None:
    keys = [entry.key for entry in manifest.tensors] + list(manifest.blobs)
    if len(set(keys)) != len(keys):
        raise CorruptCheckpointError("a key appears twice")
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name):
            raise CorruptCheckpointError(f"{file.name!r:.100} is not the name of a data file")


def _check_chunks(manifest: Manifest) -> None:
    chunks, rows = manifest.chunks, np.arange(len(manifest.chunks), dtype=np.uint32)
    if not len(chunks):
        return
    if chunks["file"].max() >= len(manifest.files):
        raise CorruptCheckpointError("a chunk is in a file that the manifest does not list")
    sizes = np.array([file.size for file in manifest.files], dtype=np.uint64)[chunks["file"]]
    stored = chunks["stored_bytes"].astype(np.uint64)
    if (stored > sizes).any() or (chunks["offset"] > sizes - np.minimum(stored, sizes)).any():
        raise CorruptCheckpointError("a chunk is outside its file")
    kinds = [Kind.from_code(int(code)) for code in np.unique(chunks["kind"])]
    widths = np.zeros(256, dtype=np.uint32)
    for kind in kinds:
        widths[kind.code] = kind.width
    raw = chunks["raw_bytes"]
    longest = longest_stored(raw.astype(np.int64), is_extended=bool(manifest.transforms))
    if (raw > MAX_CHUNK_BYTES).any() or (raw % widths[chunks["kind"]]).any() or (stored > longest).any():
        raise CorruptCheckpointError("a chunk has an impossible length")
    delta = chunks["base"] != NO_BASE
    base = chunks["base"][delta]
    if (base >= rows[delta]).any() or (raw[base] != raw[delta]).any():
        raise CorruptCheckpointError("a delta chunk has an impossible base")
    if (chunks["kind"][base] != chunks["kind"][delta]).any():
        raise CorruptCheckpointError("a delta chunk has a base of another kind")


def _check_items(manifest: Manifest) -> None:
    """Every item must be in consecutive chunks of its kind, and have the length of its shape."""
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
        raise CorruptCheckpointError("the length of an item does not match its shape")
    if (items["nbytes"][tensor_items:] > MAX_BLOB_BYTES).any():
        raise CorruptCheckpointError("an object is impossibly long")
    used = items["nbytes"] > 0
    if not used.any():
        return
    first = items["chunk"][used].astype(np.int64)
    if first.max() >= len(chunks):
        raise CorruptCheckpointError("an item starts in a chunk that does not exist")
    ends = np.cumsum(chunks["raw_bytes"], dtype=np.uint64)
    start = items["start"][used].astype(np.uint64)
    begin = ends[first] - chunks["raw_bytes"][first] + start
    if (start >= chunks["raw_bytes"][first]).any() or (items["nbytes"][used] > ends[-1] - begin).any():
        raise CorruptCheckpointError("an item is outside its chunks")
    last = np.searchsorted(ends, begin + items["nbytes"][used])
    kind_column = chunks["kind"]
    changes = np.concatenate([[0], np.cumsum(kind_column[1:] != kind_column[:-1])])
    kinds = np.array(expected_kind + [OPAQUE.code] * len(manifest.blobs), dtype=np.uint8)[used]
    if (kind_column[first] != kinds).any() or (changes[first] != changes[last]).any():
        raise CorruptCheckpointError("an item is in chunks of another kind")


def _check_wrapped(manifest: Manifest) -> None:
    """The parts of every wrapper must exist, and belong to one wrapper only."""
    tensors = {entry.key for entry in manifest.tensors}
    first = len(manifest.items) - len(manifest.blobs)
    recipes = dict(zip(manifest.blobs, manifest.items["nbytes"][first:].tolist(), strict=True))
    keys = [each.tensor.key for each in manifest.wrapped]
    used = [key for each in manifest.wrapped for key in each.part_keys]
    for entry, parts in manifest.wrapped:
        if len(parts) != len(entry.shards) or any(
            recipe not in recipes or not tensors.issuperset(leaves) for recipe, leaves in parts
        ):
            raise CorruptCheckpointError(f"{entry.key!r:.100} has missing parts")
        if any(recipes[recipe] > MAX_RECIPE_BYTES for recipe, _ in parts):
            raise CorruptCheckpointError("a recipe is impossibly long")
    # A recipe may have the key of its wrapper.
    others = (tensors | recipes.keys()).difference(used)
    if len(set(keys)) != len(keys) or len(set(used)) != len(used) or not others.isdisjoint(keys):
        raise CorruptCheckpointError("a wrapped tensor appears twice")


# --- plain Python values ------------------------------------------------------------------------------
#
# Planner data and user metadata are JSON, without loss. JSON has no tuples, no bytes, and only text keys. These are written
# as an object with one key: `{"t": [...]}` for a tuple, `{"b": "..."}` for bytes in base64, `{"d": [[key, value], ...]}` for
# a dict. Other values are ordinary JSON.

_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})


def pack_value(value: Any, what: str) -> Any:
    """Convert `value` for `json.dumps`. Subclasses of plain types become the plain type.

    Raises `UnsupportedObjectError`, naming `what` and the type, for a value that is not plain.
    """
    if type(value) in _AS_THEY_ARE or isinstance(value, str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, tuple):
        # Mostly paths of keys, as many as tensors.
        return {"t": [member if type(member) in _AS_THEY_ARE else pack_value(member, what) for member in value]}
    if isinstance(value, list):
        return [pack_value(member, what) for member in value]
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode("ascii")}
    if isinstance(value, dict):
        return {
            "d": [
                [key if type(key) is str else pack_value(key, what), pack_value(member, what)]
                for key, member in value.items()
            ]
        }
    raise UnsupportedObjectError(
        f"{what} contains a {type(value).__qualname__}, which cannot be stored without a pickle",
        next_step="use None, bool, int, float, str, bytes, list, tuple and dict",
    )


def unpack_value(packed: Any) -> Any:
    """The inverse of `pack_value`. Raises `CorruptCheckpointError` for other values."""
    if isinstance(packed, list):
        return [unpack_value(member) for member in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1:
        ((tag, content),) = packed.items()
        if tag == "t":
            return tuple([member if type(member) in _AS_THEY_ARE else unpack_value(member) for member in content])
        if tag == "b":
            return base64.b64decode(content, validate=True)
        if tag == "d":
            return {key if type(key) is str else unpack_value(key): unpack_value(member) for key, member in content}
    raise CorruptCheckpointError("the manifest contains a value of an unknown type")
