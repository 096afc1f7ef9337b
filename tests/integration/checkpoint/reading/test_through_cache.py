"""A checkpoint that is read through a cache: `CheckpointReader(url, origin=fs.as_origin())`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.errors import ObjectChangedError, ObjectNotFoundError, UsageError
from millrace.filesystem import filesystem
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(3_000_000, generator=generator),
        "half": torch.randn(700, 900, generator=generator).to(torch.bfloat16),
        "small": torch.arange(5),
    }


def restored(url: str, origin: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    empty = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(empty, storage_reader=CheckpointReader(url, origin=origin))
    return empty


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")
def test_checkpoint_through_cache_is_read_from_the_origin_once(
    s3: S3Server, bucket: str, tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    url = f"s3://{bucket}/run/step-1"
    dcp.save(state, storage_writer=CheckpointWriter(url, target_options=s3.target_options))
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        fs = filesystem(
            "s3",
            {**s3.target_options, "endpoint_url": region.endpoint_url},
            cache_dir=str(tmp_path / "cache"),
            min_free=0,
            consistency="immutable",
        )
        origin = pickle.loads(pickle.dumps(fs.as_origin()))
        for _ in range(3):
            for name, tensor in restored(url, origin, state).items():
                assert torch.equal(tensor, state[name]), name
        objects = fs.find(f"{bucket}/run", detail=True)
        assert region.stats().by_kind["GET"].bytes_down == sum(entry["size"] for entry in objects.values())


def test_invalid_read_through_cache_raises(s3: S3Server, bucket: str, s3_options: dict[str, Any]) -> None:
    fs = filesystem("s3", **s3_options)
    fs.pipe(f"{bucket}/one", b"0123456789")
    origin = fs.as_origin()
    info = origin.head(f"{bucket}/one")
    assert bytes(origin.read(info.key, 2, 5, version=info.version)) == b"234"
    with pytest.raises(UsageError, match="ends past"):
        origin.read(info.key, 5, 11)
    with pytest.raises(ObjectNotFoundError):
        origin.head(f"{bucket}/nothing")
    with pytest.raises(ObjectChangedError):
        origin.read(info.key, 0, 5, version='"another"')
