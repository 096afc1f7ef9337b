"""Exports to safetensors: one file, or a directory of files with an index as transformers reads it.

Tensors are streamed from storage to storage, in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.checkpoint.format.manifest import DTYPES, is_convertible
from millrace.checkpoint.format.safetensors import (
    INDEX_NAME,
    SINGLE_NAME,
    NewTensor,
    pack_header,
    pack_index,
    split_files,
)
from millrace.checkpoint.reading.contents import Bytes, Contents, pieces, stream, whole
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.tools.export_targets import DirectoryTarget, FileStream, FileTarget
from millrace.checkpoint.writing.packing import discard
from millrace.errors import ObjectExistsError, UsageError


def names_of(keys: Sequence[str], strip_prefix: str, renames: Sequence[str]) -> dict[str, str]:
    """The name of each key in the export. Keys without the prefix are left out.

    A rename is `PATTERN=REPLACEMENT`: a regular expression for a whole key (after the prefix is removed), and its
    replacement with groups as in `re.sub`. The first one that matches is used; other keys stay. Raises `UsageError` for a
    rename that cannot be used or matches no key, and for two keys with one name.
    """
    rules = [_rule(text) for text in renames]
    unused = dict(enumerate(renames))
    names: dict[str, str] = {}
    for key in keys:
        if not key.startswith(strip_prefix):
            continue
        name = key[len(strip_prefix) :]
        for number, (pattern, replacement) in enumerate(rules):
            if found := pattern.fullmatch(name):
                try:
                    name = found.expand(replacement)
                except (re.error, IndexError) as error:
                    raise _unusable(renames[number], error) from error
                unused.pop(number, None)
                break
        if not name:
            raise UsageError(f"{key!r} would have an empty name", next_step="use another prefix or rename")
        names[key] = name
    for text in unused.values():
        raise UsageError(f"the rename {text!r} matches no key", next_step="'millrace checkpoints show' lists the keys")
    taken: dict[str, str] = {}
    for key, name in names.items():
        if name in taken:
            raise UsageError(f"{taken[name]!r} and {key!r} would both be {name!r}", next_step="use another rename")
        taken[name] = key
    return names


def _rule(text: str) -> tuple[re.Pattern[str], str]:
    left, separator, right = text.partition("=")
    if not separator or not left:
        raise UsageError(f"{text!r} is not a rename", next_step=r"give PATTERN=REPLACEMENT, such as 'model\.(.*)=\1'")
    try:
        return re.compile(left), right
    except re.error as error:
        raise _unusable(text, error) from error


def _unusable(text: str, error: Exception) -> UsageError:
    return UsageError(
        f"the rename {text!r} cannot be used ({error})", next_step="check its regular expression and groups"
    )


def write_safetensors(
    contents: Contents,
    names: Mapping[str, str],
    dtype: str | None,
    limit_bytes: int,
    target: FileTarget | DirectoryTarget,
    count: Callable[[int], None],
) -> None:
    """Write the tensors `names` (name by key) to a file, or to the files of a directory, the last of which is the index.

    `dtype` converts the types that `is_convertible`. `limit_bytes` is the size of a file of a directory. A failed export
    of several files removes them.
    """
    # Tensors with the widest elements first, so that each is aligned; then in the order of the checkpoint.
    order = sorted(names, key=lambda key: (-DTYPES[_dtype(contents, key, dtype)][0], contents.place(key)))
    tensors = [NewTensor(names[key], _dtype(contents, key, dtype), contents.tensors[key].shape) for key in order]
    keys = dict(zip((each.name for each in tensors), order, strict=True))
    if isinstance(target, FileTarget):
        header = pack_header(tensors)
        with target.open(count) as single:
            _write(single, header, contents, order, dtype, count)
        return
    files = split_files(tensors, limit_bytes)
    headers = {name: pack_header(each) for name, each in files.items()}
    storage = _prepare(target)
    written: list[str] = []
    try:
        for name, each in files.items():
            written.append(name)
            with FileStream(storage.open_writer(name), count) as file:
                _write(file, headers[name], contents, [keys[tensor.name] for tensor in each], dtype, count)
        if len(files) > 1:
            written.append(INDEX_NAME)
            storage.publish(INDEX_NAME, pack_index(files), replace=True)
    except BaseException:
        discard(storage, written)
        target.remove_if_new()
        raise


def _prepare(target: DirectoryTarget) -> CheckpointStorage:
    """Create the directory, and remove the model that is in it if it may be overwritten: the index first.

    Other files, such as a tokenizer, stay.
    """
    storage = target.storage
    present = set(storage.names())
    former = [name for name in sorted(present) if name == SINGLE_NAME or _is_shard(name)]
    if (former or INDEX_NAME in present) and not target.overwrite:
        raise ObjectExistsError(
            f"{storage.url} contains a model", next_step="choose another directory, or overwrite it"
        )
    target.prepare(others_allowed=True)
    if INDEX_NAME in present:
        storage.delete([INDEX_NAME])
    storage.delete(former)
    return storage


def _is_shard(name: str) -> bool:
    return re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None


def _dtype(contents: Contents, key: str, dtype: str | None) -> str:
    stored = contents.tensors[key].dtype
    return dtype if dtype is not None and is_convertible(stored) else stored


def _write(
    file: FileStream,
    header: bytes,
    contents: Contents,
    keys: Sequence[str],
    dtype: str | None,
    count: Callable[[int], None],
) -> None:
    file.write(header)
    parts = (piece for key in keys for piece in pieces(contents, whole(contents.tensors[key])))
    for box, data in stream(contents, parts, count=count):
        converted = _converted(data, box.dtype, _dtype(contents, box.key, dtype))
        file.write(converted.data)
        count(max(0, data.nbytes - converted.nbytes))  # each byte that was read also counts as written


def _converted(data: Bytes, stored: str, dtype: str) -> Bytes:
    if stored == dtype or not data.size:
        return data
    import torch  # only a conversion needs it

    from millrace.checkpoint.state.tensors import bytes_of, torch_dtype

    values: Any = torch.from_numpy(data).view(torch_dtype(stored)).to(torch_dtype(dtype))
    converted: Bytes = bytes_of(values).numpy()
    return converted
