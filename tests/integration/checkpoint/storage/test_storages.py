"""Runs of checkpoints in storages other than S3 and files: Azure, and one that only fsspec reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from tests.support.azurite import AzuriteServer

from millrace.checkpoint import CheckpointManager, KeepLast
from millrace.errors import RunTakenError


@pytest.fixture
def azure(azurite: AzuriteServer, container: str) -> tuple[str, Mapping[str, Any]]:
    return f"az://{container}/runs/one", azurite.target_options


@pytest.fixture
def memory() -> Iterator[tuple[str, None]]:
    name = f"runs-{uuid4().hex}"
    yield f"memory://{name}/runs/one", None
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)


def state(seed: int) -> dict[str, Any]:
    return {"weights": torch.randn(300_000, generator=torch.Generator().manual_seed(seed)), "step": seed}


@pytest.mark.parametrize("place", [pytest.param("azure", marks=pytest.mark.azurite), "memory"])
def test_run_on_any_storage_is_saved_pruned_claimed_and_restored(place: str, request: pytest.FixtureRequest) -> None:
    url, options = request.getfixturevalue(place)
    with CheckpointManager(url, target_options=options, keep=KeepLast(2)) as run:
        assert run.restore(state(0)) is None
        for step in (1, 2, 3, 4):
            run.save(step, state(step))
        assert run.steps() == [3, 4]
        with CheckpointManager(url, target_options=options, keep=KeepLast(2)) as second:
            second.save(5, state(5))
            with pytest.raises(RunTakenError):  # raised by the conditional write
                run.save(6, state(6))
    with CheckpointManager(url, target_options=options) as run:
        found = state(0)
        assert run.restore(found) == 5
        assert torch.equal(found["weights"], state(5)["weights"])
