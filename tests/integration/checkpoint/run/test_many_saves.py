"""A manager's memory does not grow from save to save: after forty saves it is the same as after ten."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.checkpoint import CheckpointManager
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# Libraries keep buffers for a while. So the most of some early saves is compared with the least of some late ones.
EARLY, LATE = range(8, 13), range(38, 43)
# Of each save its step, revision and name are kept.
OBJECTS_OF_A_SAVE = 8
HEAP_BYTES = 4 << 20


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def heap_bytes() -> int:
    """What the C allocator has given out and not got back, in all its arenas. Unlike resident memory it has no gaps."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def training_state() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def objects_and_heap(run: CheckpointManager) -> tuple[int, int]:
    run.wait()
    gc.collect()
    return len(gc.get_objects()), heap_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["directory", "object store", "tiers"])
def test_many_saves_use_no_more_memory_than_a_few(place: str, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    url, options = f"s3://{bucket}/run", s3.target_options
    more: dict[str, Any] = {
        "directory": {"url": tmp_path / "run"},
        "object store": {"url": url, "target_options": options},
        "tiers": {"url": url, "target_options": options, "local": tmp_path / "near"},
    }[place]
    model, optimizer = training_state()
    measured: dict[int, tuple[int, int]] = {}
    with CheckpointManager(**more, keep=3) as run:
        for step in range(1, LATE.stop):
            model(torch.randn(4, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model, "optimizer": optimizer, "step": step}
            if step % 2:
                run.save(step, state, metrics={"loss": 1.0 / step})
            else:
                run.save_async(step, state, metrics={"loss": 1.0 / step})
            if step in EARLY or step in LATE:
                measured[step] = objects_and_heap(run)
    early = [max(numbers) for numbers in zip(*(measured[step] for step in EARLY), strict=True)]
    late = [min(numbers) for numbers in zip(*(measured[step] for step in LATE), strict=True)]
    assert late[0] - early[0] < OBJECTS_OF_A_SAVE * (LATE.start - EARLY.stop), measured
    assert late[1] - early[1] < HEAP_BYTES, measured
