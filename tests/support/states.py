"""States: nested dicts, lists and tuples of tensors and values, compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements, in the order of the indices."""
    return _flat(tensor).numpy().tobytes()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same as a tensor, without a copy where the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.itemsize == 1:
        plain = plain.view(torch.uint8)  # torch cannot copy every dtype
    # Without strides: torch calls one element contiguous whatever they are.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def assert_same_state(found: Any, expected: Any, where: str = "state") -> None:
    """The same types, keys in the same order, dtypes, shapes and bits; other values are equal, or both NaN."""
    assert type(found) is type(expected), f"{where} is of {type(found)}, not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (
            f"{where} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
        assert torch.equal(_flat(found), _flat(expected)), f"{where} has other bits"
    elif isinstance(expected, dict):
        assert list(found) == list(expected), f"{where} has the keys {list(found)}, not {list(expected)}"
        for key, value in expected.items():
            assert_same_state(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{where} has {len(found)} members, not {len(expected)}"
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same_state(one, other, f"{where}[{number}]")
    else:
        assert found == expected or (found != found and expected != expected), f"{where} is {found!r}, not {expected!r}"


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """With whole tensors in the place of DTensors: every rank has to call it."""
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def in_order(state: Any) -> Any:
    """With sorted keys, where their order may be another."""
    if isinstance(state, dict):
        return type(state)((key, in_order(state[key])) for key in sorted(state))
    return type(state)(map(in_order, state)) if isinstance(state, list) else state
