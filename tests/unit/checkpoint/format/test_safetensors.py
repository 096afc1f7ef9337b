"""The safetensors format: headers and indexes are packed and read, and damaged ones raise one error."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save

from millrace.checkpoint.format.safetensors import (
    SINGLE_NAME,
    NewTensor,
    header_bytes,
    pack_header,
    pack_index,
    parse_header,
    parse_index,
    split_files,
)
from millrace.errors import CorruptCheckpointError, UnsupportedObjectError

TENSORS = [NewTensor("a", "float32", (2, 3)), NewTensor("b", "bfloat16", (4,)), NewTensor("none", "int8", (0, 5))]


def test_packed_header_is_read_by_safetensors_and_back() -> None:
    values = bytes(range(sum(each.nbytes for each in TENSORS)))
    data = pack_header(TENSORS) + values
    assert {name: (each["dtype"], each["shape"]) for name, each in deserialize(data)} == {
        "a": ("F32", [2, 3]),
        "b": ("BF16", [4]),
        "none": ("I8", [0, 5]),
    }
    length = header_bytes(data[:8], len(data))
    parsed = parse_header(data[:length], len(data))
    assert [(each.name, each.dtype, each.shape) for each in parsed] == [tuple(each) for each in TENSORS]
    assert data[parsed[1].start : parsed[1].stop] == values[24:32]


def test_header_of_the_library_is_read() -> None:
    data = save({"x": np.array([1, 2, 3], dtype=np.float16)}, {"format": "pt"})
    (tensor,) = parse_header(data[: header_bytes(data, len(data))], len(data))
    assert (tensor.name, tensor.dtype, tensor.shape) == ("x", "float16", (3,))
    assert np.frombuffer(data[tensor.start : tensor.stop], np.float16).tolist() == [1, 2, 3]


def test_header_with_a_new_element_type_keeps_the_other_tensors() -> None:
    text = json.dumps({"q": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    data = len(text).to_bytes(8, "little") + text + b"ab"
    (tensor,) = parse_header(data[: header_bytes(data, len(data))], len(data))
    assert (tensor.dtype, tensor.stored_dtype, tensor.stop - tensor.start) == (None, "F4", 2)


@pytest.mark.parametrize(
    "value",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 5]},  # another length than the shape
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},  # past the end of the file
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F4", "shape": [8], "data_offsets": [4, 2]},
        {"dtype": "F32", "shape": [0, 1 << 63], "data_offsets": [0, 0]},
        [],
        None,
    ],
)
def test_impossible_header_raises_corrupt(value: object) -> None:
    text = json.dumps({"a": value}).encode()
    data = len(text).to_bytes(8, "little") + text + b"0123"
    with pytest.raises(CorruptCheckpointError):
        parse_header(data[: header_bytes(data, len(data))], len(data))


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F4","shape":[2],"data_offsets":[2,4]}}',
        '{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"a":{"dtype":"I8","shape":[3],"data_offsets":[0,3]}}',
    ],
    ids=["overlap", "name twice"],
)
def test_header_with_ambiguous_values_raises_corrupt(text: str) -> None:
    data = len(text).to_bytes(8, "little") + text.encode() + b"0123"
    with pytest.raises(CorruptCheckpointError):
        parse_header(data[: header_bytes(data, len(data))], len(data))


def test_any_damage_to_a_header_raises_corrupt_or_stays_inside_the_file() -> None:
    data = pack_header(TENSORS) + bytes(sum(each.nbytes for each in TENSORS))
    rng = random.Random(19)
    for _ in range(2000):
        harmed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            harmed[rng.randrange(len(data) - 32)] = rng.randrange(256)
        cut = rng.choice((len(harmed), rng.randrange(len(harmed))))
        head = bytes(harmed[:cut])
        try:
            found = parse_header(head[: header_bytes(head, len(head))], len(head))
        except CorruptCheckpointError:
            continue
        assert all(0 <= each.start <= each.stop <= len(head) for each in found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../b"}}',
        r'{"weight_map": {"a": "\ud800"}}',
        "[" * 9999,
    ],
)
def test_impossible_index_raises_corrupt(text: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        parse_index(text.encode())


def test_packed_index_is_read_back() -> None:
    files = {"one": TENSORS[:1], "two": TENSORS[1:]}
    data = pack_index(files)
    assert parse_index(data) == {"a": "one", "b": "two", "none": "two"}
    assert json.loads(data)["metadata"] == {"total_size": 32}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1000, [["a", "b", "none"]]),
        (32, [["a", "b", "none"]]),
        (24, [["a"], ["b", "none"]]),
        (1, [["a"], ["b"], ["none"]]),  # a file has one tensor at least
    ],
)
def test_files_are_split_at_the_limit(limit: int, expected: list[list[str]]) -> None:
    files = split_files(TENSORS, limit)
    assert [[each.name for each in group] for group in files.values()] == expected
    count = len(expected)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    assert list(files) == ([SINGLE_NAME] if count == 1 else names)


def test_names_that_the_format_cannot_have_raise() -> None:
    with pytest.raises(UnsupportedObjectError, match="second 'a'"):
        pack_header([TENSORS[0], TENSORS[0]])
    with pytest.raises(UnsupportedObjectError, match="complex128"):
        pack_header([NewTensor("c", "complex128", (1,))])
    with pytest.raises(UnsupportedObjectError, match="not valid Unicode"):
        pack_header([NewTensor("\ud800", "int8", (1,))])
