"""Runs of checkpoints in storages other than S3 and files: Azure, and one that only fsspec reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch

from millrace.checkpoint import CheckpointManager, KeepLast
from millrace.errors import RunTakenError
from millrace.testing.azurite import AzuriteServer


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
def test_a_run_is_saved_thinned_taken_over_and_restored(place: str, request: pytest.FixtureRequest) -> None:
    url, options = request.getfixturevalue(place)
    with CheckpointManager(url, target_options=options, keep=KeepLast(2)) as run:
        assert run.restore(state(0)) is None
        for step in (1, 2, 3):
            run.save(step, state(step))
        assert run.steps() == [2, 3]
        with CheckpointManager(url, target_options=options, keep=KeepLast(2)) as second:
            second.save(4, state(4))
            with pytest.raises(RunTakenError):  # one that was made only where none is says so
                run.save(5, state(5))
    with CheckpointManager(url, target_options=options) as run:
        found = state(0)
        assert run.restore(found) == 4
        assert torch.equal(found["weights"], state(4)["weights"])
