"""Checkpoints on a real S3 server."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.memory import resident_bytes
from tests.support.states import assert_same_state
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint import CheckpointReader, CheckpointWriter, describe
from millrace.checkpoint.storage.storage import open_storage
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeniedError,
    MillraceError,
    ObjectExistsError,
)
from millrace.origin import open_origin

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def weights(seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    # Enough for a multipart upload.
    return {"w": torch.randn(3000, 1500, generator=generator), "h": torch.randn(2_000_000).bfloat16(), "step": seed}


def save(state, url, runs_server, **options):
    writer = CheckpointWriter(url, target_options=runs_server.target_options, **options)
    dcp.save(state, storage_writer=writer)
    return writer


def load(state, url, runs_server, **options):
    loaded = {key: torch.zeros_like(value) if hasattr(value, "dtype") else None for key, value in state.items()}
    dcp.load(loaded, storage_reader=CheckpointReader(url, target_options=runs_server.target_options, **options))
    return loaded


def names(url, runs_server):
    return sorted(open_storage(url, runs_server.target_options).names())


@pytest.mark.slow
def test_overwritten_checkpoint_on_s3_is_loaded(runs_server):
    url, first, second = "s3://runs/a/step-100", weights(), weights(1)
    writer = save(first, url, runs_server)
    assert_same_state(load(first, url, runs_server), first)
    before = names(url, runs_server)
    dcp.save(second, storage_writer=pickle.loads(pickle.dumps(writer)))
    assert_same_state(load(second, url, runs_server), second)
    after = names(url, runs_server)
    assert set(before) & set(after) == {"manifest.millrace"}
    assert len(after) == 2
    summary = describe(url, runs_server.target_options)
    assert summary == CheckpointReader(url, target_options=runs_server.target_options).summary()
    assert summary.raw_bytes > summary.stored_bytes > 0.6 * summary.raw_bytes


def test_checkpoint_is_read_through_another_origin(runs_server):
    url, state = "s3://runs/b", weights()
    save(state, url, runs_server)
    loaded = {key: torch.zeros_like(value) if hasattr(value, "dtype") else None for key, value in state.items()}
    dcp.load(loaded, storage_reader=CheckpointReader(url, origin=open_origin("s3", runs_server.target_options)))
    assert_same_state(loaded, state)


def test_concurrent_saves_without_overwrite_have_one_winner(runs_server):
    url = "s3://runs/c"
    save({"x": torch.ones(3)}, url, runs_server, overwrite=False)
    with pytest.raises(CheckpointException) as caught:
        save({"x": torch.zeros(3)}, url, runs_server, overwrite=False)
    assert isinstance(caught.value.failures[0][0], ObjectExistsError)
    # The conditional PUT alone decides, should both look at the same time.
    with pytest.raises(ObjectExistsError):
        open_storage(url, runs_server.target_options).publish("manifest.millrace", b"other", replace=False)
    assert_same_state(load({"x": torch.ones(3)}, url, runs_server), {"x": torch.ones(3)})


def test_failed_save_keeps_the_previous_checkpoint(runs_server, monkeypatch):
    url, state = "s3://runs/d", {"x": torch.randn(4_000_000), "step": 0}
    save(state, url, runs_server)
    before = names(url, runs_server)
    with pytest.raises(CheckpointException):
        save({"x": torch.randn(9_000_000), "y": torch.empty(3, device="meta")}, url, runs_server)
    assert names(url, runs_server) == before
    assert_same_state(load(state, url, runs_server), state)


@pytest.mark.slow
def test_upload_needs_bounded_memory(runs_server):
    """Parts are uploaded while later ones are compressed. A store that is slower than the codec delays the codec."""
    nbytes = 384 << 20
    state = {"w": torch.randint(0, 256, (nbytes,), dtype=torch.uint8)}
    save({"w": state["w"][: 40 << 20]}, "s3://runs/warm-up", runs_server)
    began = highest = resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, resident_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        save(state, "s3://runs/large", runs_server)
    finally:
        done.set()
        watching.join()
    assert highest - began < nbytes * 2 // 3
    summary = describe("s3://runs/large", runs_server.target_options)
    assert summary.stored_bytes >= nbytes


def test_missing_denied_or_damaged_checkpoint_raises_its_error(runs_server):
    with pytest.raises(CheckpointNotFoundError, match="s3://runs/nothing"):
        describe("s3://runs/nothing", runs_server.target_options)
    with pytest.raises(DeniedError):
        describe("s3://runs/a", {**runs_server.target_options, "secret": "wrong"})
    url, state = "s3://runs/e", {"x": torch.randn(1000)}
    save(state, url, runs_server)
    storage = open_storage(url, runs_server.target_options)
    (data,) = [name for name in names(url, runs_server) if name.startswith("data-")]
    file = storage.stat(data)
    content = bytearray(memoryview(storage.read(file, 0, file.size)))
    content[100] ^= 1
    storage.publish(data, content, replace=True)
    with pytest.raises(CheckpointException) as caught:
        load(state, url, runs_server)
    assert isinstance(caught.value.failures[0][0], CorruptCheckpointError)
    storage.delete([data])
    with pytest.raises(CheckpointException) as caught:
        load(state, url, runs_server)
    assert isinstance(caught.value.failures[0][0], MillraceError)


@pytest.mark.parametrize("zstd", [False, True])
def test_stock_checkpoint_on_s3_is_read(runs_server, tmp_path, zstd):
    from torch.distributed.checkpoint._extension import ZStandard

    state, url = {"x": torch.randn(3000, 7), "step": 4}, f"s3://runs/stock-{zstd}"
    extensions = [ZStandard()] if zstd else None
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock", _extensions=extensions))
    storage = open_storage(url, runs_server.target_options)
    for file in (tmp_path / "stock").iterdir():
        storage.publish(file.name, file.read_bytes(), replace=True)
    assert_same_state(load(state, url, runs_server), state)
    summary = describe(url, runs_server.target_options)
    assert (summary.format_version, summary.tensors, summary.objects) == (0, 1, 1)
    # Saving over it leaves nothing of it.
    save(state, url, runs_server)
    assert_same_state(load(state, url, runs_server), state)
    assert [name for name in names(url, runs_server) if not name.endswith(".millrace")] == []
