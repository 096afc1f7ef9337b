"""Tensor subclasses that keep their values in inner tensors, as quantization libraries make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

_aten = torch.ops.aten


class Scaled(torch.Tensor):
    """Integers and a scale for each row, with settings; it looks like a tensor of `dtype`."""

    @staticmethod
    def __new__(cls, values: Any, scale: Any, settings: Any, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)

    def __init__(self, values: Any, scale: Any, settings: Any, dtype: torch.dtype) -> None:
        self.values_, self.scale, self.settings = values, scale, settings

    def __tensor_flatten__(self) -> Any:
        return ["values_", "scale"], {"settings": self.settings, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["values_"], inner["scale"], context["settings"], context["dtype"])

    def __repr__(self) -> str:
        return f"Scaled({self.values_!r}, {self.scale!r}, {self.settings!r})"

    def dequantized(self) -> Any:
        return (self.values_.to(torch.float32) * self.scale[:, None]).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            target, source = args[:2]
            if isinstance(target, Scaled) and isinstance(source, Scaled):
                if target.settings != source.settings:
                    raise ValueError(f"settings {source.settings} into {target.settings}")
                target.values_.copy_(source.values_)
                target.scale.copy_(source.scale)
                return target
            if isinstance(source, Scaled):
                return target.copy_(source.dequantized())
        if func in (_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.alias.default):
            keep = {name: value for name, value in kwargs.items() if name in ("device", "memory_format")}
            keep = {} if func in (_aten.detach.default, _aten.alias.default) else keep
            old = args[0]
            new = cls(func(old.values_, **keep), func(old.scale, **keep), old.settings, old.dtype)
            return return_and_correct_aliasing(func, args, kwargs, new)
        if func is _aten.is_pinned.default:
            return False
        raise NotImplementedError(f"{func} of a Scaled")


class Opaque(torch.Tensor):
    """Holds a tensor, and declares no way to find it."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self._hidden = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_aten.detach.default, _aten.clone.default, _aten.alias.default):
            return cls(func(args[0]._hidden))
        raise NotImplementedError(f"{func} of an Opaque")


@dataclass(frozen=True)
class Settings:
    """A class that torch's safe loader does not admit."""

    bits: int


def scaled(rows: int, columns: int, *, settings: Any = ("symmetric", 8), dtype: torch.dtype = torch.bfloat16) -> Scaled:
    values = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    # A NaN with a payload: only a copy of bits keeps it.
    scale = torch.rand(rows)
    scale[0] = torch.tensor(0x7FC01234, dtype=torch.int32).view(torch.float32)
    return Scaled(values, scale, settings, dtype)


def emptied(tensor: Any) -> Any:
    """A wrapper of the same kind with zeros in it."""
    if type(tensor) is torch.Tensor:
        return torch.zeros_like(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: emptied(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def contents(tensor: Any) -> Any:
    """All that a tensor holds: its class, shape, and strides, and the bytes and strides of the plain tensors in it."""
    about = (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return (*about, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    names, context = tensor.__tensor_flatten__()
    return (*about, context, *(contents(getattr(tensor, name)) for name in names))
