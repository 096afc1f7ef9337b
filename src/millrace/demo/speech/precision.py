"""Which numbers a model computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from millrace.demo.speech.settings import Precision
from millrace.errors import ConfigurationError


class MixedPrecision:
    """Autocast around the forward pass, and for float16 the scaling of gradients that it needs.

    `"auto"` is bfloat16 on a GPU that computes in it, float16 on another one, and float32 on a CPU, where lower precision
    is slower more often than not. Raises `ConfigurationError` for float16 on a CPU.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.name = _chosen(precision, device)
        self._device = device
        self._dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.name]
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.name == "fp16")

    def computing(self) -> AbstractContextManager[Any]:
        """Around a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, dtype=self._dtype)

    def step(
        self, loss: torch.Tensor, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, norm: float
    ) -> None:
        """Backward, gradients clipped to `norm`, and a step of the optimizer (which float16 may leave out)."""
        optimizer.zero_grad()
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the scaling. The same keys for every precision: a run may be resumed in another."""
        tracker = self._scaler.state_dict().get("_growth_tracker", 0)
        return {"precision": self.name, "scale": float(self._scaler.get_scale()), "growth_tracker": int(tracker)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a scaling that was saved, if this precision scales and that one did."""
        if state["precision"] == self.name == "fp16":
            here = self._scaler.state_dict()
            self._scaler.load_state_dict(
                {**here, "scale": float(state["scale"]), "_growth_tracker": int(state["growth_tracker"])}
            )


def _chosen(precision: Precision, device: torch.device) -> str:
    if precision == "auto":
        if device.type != "cuda":
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if precision == "fp16" and device.type == "cpu":
        raise ConfigurationError("precision is 'fp16' on a CPU", next_step="give 'bf16' or 'fp32', or train on a GPU")
    return precision
