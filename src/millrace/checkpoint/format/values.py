"""Encodes plain Python values (planner data, user metadata) as JSON, without loss. Pure.

JSON has no tuples, no bytes, and only text keys. These are written as an object with one key: `{"t": [...]}` for a tuple,
`{"b": "..."}` for bytes in base64, `{"d": [[key, value], ...]}` for a dict. Other values are ordinary JSON.
"""

from __future__ import annotations

import base64
from typing import Any

from millrace.errors import CorruptCheckpointError, UnsupportedObjectError

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
