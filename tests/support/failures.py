"""Errors of torch's checkpoint functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException


def failures_of(call: Callable[..., object], *args: Any, **options: Any) -> dict[int, BaseException]:
    """The error of each rank that failed, which torch wraps in a BaseException."""
    with pytest.raises(CheckpointException) as caught:
        call(*args, **options)
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


def failure_of(call: Callable[..., object], *args: Any, **options: Any) -> BaseException:
    """The error of the only rank that failed."""
    (error,) = failures_of(call, *args, **options).values()
    return error
