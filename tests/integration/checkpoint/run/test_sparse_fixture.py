"""The checkpoints with sparse deltas that the first release of the form has written stay readable.

`python tests/integration/checkpoint/run/test_sparse_fixture.py DIRECTORY` writes such checkpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from millrace.checkpoint import WeightFollower, WeightPublisher, load_weights, verify_checkpoint
from millrace.checkpoint.format.manifest import decode_manifest
from millrace.checkpoint.format.tables import NO_BASE

FIXTURE = Path(__file__).parents[3] / "fixtures" / "checkpoint-v1-sparse"


def weights(step: int) -> dict[str, torch.Tensor]:
    """Values that do not depend on a random generator. Step 2 changes the smallest ones of `half`, and few of the others."""
    noise = (torch.arange(20_000) * 40503 % 65536 - 32768).float()
    values = {
        "half": (noise / 1e6).to(torch.bfloat16),
        "single": noise[:2000] / 7,
        "whole": torch.arange(3000),
        "byte": torch.arange(5000).to(torch.uint8),
    }
    if step == 2:
        half = values["half"]
        half[half.abs() < 0.001] *= 1.125
        values["half"].view(torch.int16)[::500] += 1
        values["single"][::200] += 0.25
        values["whole"][70] = -1
        values["byte"][4000:4100] += 3
    return values


@pytest.mark.parametrize("step", [1, 2])
def test_checkpoint_with_sparse_deltas_of_the_first_release_is_read(step: int) -> None:
    path = FIXTURE / f"step-{step:012d}"
    manifest = decode_manifest((path / "manifest.millrace").read_bytes())
    assert manifest.sparse == (step == 2)
    assert (manifest.chunks["base"] != NO_BASE).any() == (step == 2)
    loaded = load_weights(path)
    for key, value in weights(step).items():
        assert torch.equal(loaded[key], value), key
    assert verify_checkpoint(path).ok


def test_follower_applies_the_deltas_of_the_first_release() -> None:
    mine = weights(1)
    assert WeightFollower(FIXTURE).update(mine) == 2
    for key, value in weights(2).items():
        assert torch.equal(mine[key], value), key


if __name__ == "__main__":
    with WeightPublisher(sys.argv[1]) as publisher:
        publisher.publish(1, weights(1))
        publisher.publish(2, weights(2))
