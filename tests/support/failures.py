"""Errors of torch's checkpoint functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException


def failure_of(call: Callable[..., object], *args: Any, **options: Any) -> BaseException:
    """The error of rank 0, which torch wraps in a BaseException."""
    with pytest.raises(CheckpointException) as caught:
        call(*args, **options)
    return caught.value.failures[0][0]
