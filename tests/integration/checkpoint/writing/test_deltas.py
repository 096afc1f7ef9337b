"""Saves that build on earlier ones: references, deltas, and restores of them."""

from __future__ import annotations

import io
import pathlib
import pickle
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.integration.checkpoint import test_ranks as ranks_module
from tests.support import ranks
from tests.support.checkpoints import data_file
from tests.support.failures import failure_of
from tests.support.harms import flip
from tests.support.runs import name_of
from tests.support.states import assert_same_state, bits, gathered
from torch.distributed.checkpoint._extension import StreamTransformExtension

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.codec.chunks import CHUNK_BYTES, Kind
from millrace.checkpoint.format.manifest import DTYPES
from millrace.checkpoint.format.tables import chain_costs, restore_bytes
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.storage import open_storage
from millrace.checkpoint.writing import packing
from millrace.checkpoint.writing.bases import StoredBase
from millrace.errors import BaseGoneError, ConfigurationError, CorruptCheckpointError, UsageError
from millrace.events import add_hook
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(root, step: int, state: dict, base=None, **options) -> CheckpointWriter:
    writer = CheckpointWriter(root / name_of(step), sync_files=False, base=base, keep_base=True, **options)
    dcp.save(state, storage_writer=writer)
    return writer


def stored(root: pathlib.Path, step: int, **options) -> StoredBase:
    return StoredBase.open(open_storage(root / name_of(step)), name_of(step), **options)


def blank(value):
    """Where a value can be loaded into."""
    if isinstance(value, dict):
        return {key: type(member)() for key, member in value.items()}
    return torch.zeros(value.numel() * value.itemsize, dtype=torch.uint8).view(value.dtype).view(value.shape)


def load(root, step: int, like: dict, **options) -> dict:
    state = {key: blank(value) for key, value in like.items()}
    dcp.load(state, storage_reader=CheckpointReader(root / name_of(step), **options))
    return state


def weights(count: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def nudged(tensor: torch.Tensor, seed: int, size: float = 1e-3) -> torch.Tensor:
    """The tensor after a small step."""
    step = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * size
    return (tensor.float() * (1 + step)).to(tensor.dtype)


def mixed(seed: int = 0) -> dict:
    """Large and small tensors, some frozen, and objects."""
    return {
        "frozen": weights(700_000, 1),
        "moving": weights(900_000, seed),
        "bf16": weights(800_000, seed, torch.bfloat16),
        "steps": torch.arange(300_000) + seed,
        **{f"small.{number}": weights(50 + number, seed) for number in range(30)},
        **{f"bias.{number}": weights(50 + number, 2, torch.float16) for number in range(30)},
        "object": {"step": seed, "names": ["a", "b"]},
        "constant object": {"lr": 0.1},
    }


def moved(state: dict, seed: int) -> dict:
    changing = ("moving", "bf16", "small")
    return {
        key: nudged(value, seed) if key.split(".")[0] in changing else value + 1 if key == "steps" else value
        for key, value in state.items()
    }


def counts(writer: CheckpointWriter) -> tuple[int, int, int]:
    stats = writer.stats
    assert stats is not None
    assert stats.chunks == stats.chunks_full + stats.chunks_delta + stats.chunks_referenced
    return stats.chunks_full, stats.chunks_delta, stats.chunks_referenced


@pytest.fixture(params=["memory", "stored"])
def base_of(request, tmp_path):
    """The base that a save makes for the next one, from its tensors or from its files."""

    def make(writer: CheckpointWriter, step: int):
        return writer.written_base(name_of(step)) if request.param == "memory" else stored(tmp_path, step)

    return make


def test_unchanged_chunks_are_not_written_again(tmp_path, base_of):
    first = mixed()
    writer = save(tmp_path, 1, first)
    second = moved(first, 5)
    other = save(tmp_path, 2, second, base_of(writer, 1))
    full, delta, referenced = counts(other)
    # Three chunks of "frozen" and the pack of biases; both objects are in one chunk, of which one has not changed.
    assert referenced >= 4
    assert delta >= 6
    # The counters, which are small when they are whole.
    assert full <= 3
    assert other.stats.stored_bytes < 0.6 * writer.stats.stored_bytes
    assert_same_state(load(tmp_path, 2, second), second)
    assert_same_state(load(tmp_path, 1, first), first)


def test_unchanged_state_writes_no_data(tmp_path, base_of):
    state = mixed()
    writer = save(tmp_path, 1, state)
    other = save(tmp_path, 2, state, base_of(writer, 1))
    assert counts(other) == (0, 0, writer.stats.chunks)
    assert other.stats.stored_bytes == 0
    assert sorted(path.name for path in (tmp_path / name_of(2)).iterdir()) == ["manifest.millrace"]
    assert other.stats.restore_bytes == writer.stats.restore_bytes
    assert_same_state(load(tmp_path, 2, state), state)


def test_element_types_are_equal_through_a_chain_of_nine(tmp_path, base_of):
    """Small tensors, which share chunks, and one large one of each type; some change in each save, and some do not."""

    def values(number: int, dtype: torch.dtype, count: int, step: int) -> torch.Tensor:
        generator = np.random.default_rng(number)
        raw = generator.integers(0, 2 if dtype == torch.bool else 256, count * dtype.itemsize, np.uint8)
        for changed in range(step):
            # A few more bytes each time; noise in some types, NaNs among it.
            places = np.random.default_rng((number, changed)).integers(0, raw.size, 1 + raw.size // 50)
            raw[places] ^= 1
        return torch.from_numpy(raw).view(dtype)

    types = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]

    def state(step: int) -> dict:
        small = {f"small {dtype}": values(number, dtype, 700, step) for number, dtype in enumerate(types)}
        large = {
            f"large {dtype}": values(number, dtype, 200_000 // dtype.itemsize, step * (number % 2))
            for number, dtype in enumerate(types)
        }
        return {**small, **large}

    base = None
    sizes = []
    for step in range(9):
        writer = save(tmp_path, step, state(step), base, restore_limit=20.0)
        base = base_of(writer, step)
        sizes.append(writer.stats.restore_bytes)
    chunks = read_manifest(open_storage(tmp_path / name_of(8))).manifest.chunks
    assert chain_costs(chunks).deltas.max() >= 7
    assert sizes[8] == restore_bytes(chunks)
    for step in (0, 4, 8):
        assert_same_state(load(tmp_path, step, state(step)), state(step))


@pytest.mark.parametrize("anchored", [False, True])
def test_restore_reads_at_most_twice_the_size_of_a_chunk(tmp_path, anchored):
    state, base, full_bytes = mixed(), None, 0
    for step in range(9):
        writer = save(tmp_path, step, state, base)
        base = base if anchored and step else writer.written_base(name_of(step))
        full_bytes = full_bytes or writer.stats.stored_bytes
        assert writer.stats.restore_bytes <= 2 * full_bytes
        assert_same_state(load(tmp_path, step, state), state)
        state = moved(state, step + 7)
    assert writer.stats.chunks_referenced


def test_higher_limit_makes_longer_chains(tmp_path):
    state, base = {"w": weights(300_000)}, None
    written = {}
    for limit in (1.0, 2.0, 10.0):
        state, base = {"w": weights(300_000)}, None
        for step in range(5):
            writer = save(tmp_path / str(limit), step, state, base, restore_limit=limit)
            base = writer.written_base(name_of(step))
            written[limit] = [*written.get(limit, []), writer.stats.chunks_delta]
            state = {"w": nudged(state["w"], step)}
    assert written == {1.0: [0] * 5, 2.0: [0, 2, 0, 2, 0], 10.0: [0, 2, 2, 2, 2]}
    with pytest.raises(ConfigurationError, match="restore_limit"):
        CheckpointWriter(tmp_path, restore_limit=0.5)


def test_chain_stays_within_the_limit_of_readers(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MAX_BASES", 3)
    state, base, kinds = {"w": weights(40_000)}, None, []
    for step in range(8):
        writer = save(tmp_path, step, state, base, restore_limit=100.0)
        base = writer.written_base(name_of(step))
        kinds.append(writer.stats.chunks_delta)
        assert_same_state(load(tmp_path, step, state), state)
        state = {"w": nudged(state["w"], step)}
    assert kinds == [0, 1, 1, 1, 0, 1, 1, 1]


def test_delta_with_changed_dtype_or_shape_is_saved(tmp_path, base_of):
    first = {
        "a": weights(300_000),
        "b": weights(300_000, 1, torch.bfloat16),
        "c": weights(300_000, 2),
        "d": weights(90),
    }
    second = {
        "a": first["a"].to(torch.bfloat16),
        "b": first["b"].view(torch.float16),
        "c": nudged(first["c"], 1)[:200_000].reshape(400, 500),
        "e": weights(90),
    }
    writer = save(tmp_path, 1, first)
    other = save(tmp_path, 2, second, base_of(writer, 1))
    assert_same_state(load(tmp_path, 2, second), second)
    # Of another type of the same kind only the name has changed. A tensor that is shorter has other chunks.
    assert counts(other) == (3, 0, 1)


@pytest.mark.parametrize("compression", ["none", "max", "adaptive"])
def test_deltas_of_every_compression_are_loaded_equal(tmp_path, compression, base_of):
    first = mixed()
    second = moved(first, 3)
    writer = save(tmp_path, 1, first, compression=compression)
    other = save(tmp_path, 2, second, base_of(writer, 1), compression=compression)
    _, delta, referenced = counts(other)
    assert referenced >= 4
    # A difference that is not compressed is as long as the values.
    assert (delta == 0) == (compression == "none")
    assert_same_state(load(tmp_path, 2, second), second)


def test_noncontiguous_values_are_saved_as_deltas(tmp_path, base_of):
    one = weights(1_000_000).reshape(1000, 1000)
    first = {"turned": one.t(), "every other": one[::2], "complex": torch.complex(one, one)[:300].conj()}
    two = nudged(one, 1)
    second = {"turned": two.t(), "every other": two[::2], "complex": torch.complex(two, one)[:300].conj()}
    base = base_of(save(tmp_path, 1, first), 1)
    other = save(tmp_path, 2, second, base)
    assert counts(other)[1] >= 5
    loaded = load(tmp_path, 2, second)
    for key, value in second.items():
        assert torch.equal(loaded[key], value.resolve_conj())


def test_tensors_are_not_copied_for_the_next_save(tmp_path):
    state = {"w": weights(300_000), "small": weights(10)}
    base = save(tmp_path, 1, state).written_base(name_of(1))
    for key, tensor in state.items():
        part = ((key, (0,), 0, tensor.nbytes),)
        row = base.find(part, Kind(4, True), tensor.nbytes) if key == "small" else 0
        part = ((key, (0,), 0, min(tensor.nbytes, CHUNK_BYTES)),)
        assert bytes(memoryview(base.read(row, part))) == bits(tensor)[:CHUNK_BYTES]
        tensor[0] = 5.0
        assert np.frombuffer(base.read(row, part), dtype=np.float32)[0] == 5.0


@pytest.fixture
def events():
    """Names of the events meanwhile."""
    names: list[str] = []
    remove = add_hook(lambda event: names.append(event.name))
    yield names
    remove()


def test_base_tensor_changed_in_place_is_detected_and_saved_in_full(tmp_path, events):
    state = mixed()
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    base = save(tmp_path, 1, state).written_base(name_of(1))
    state["moving"] += 1
    state["bf16"] *= 2
    other = save(tmp_path, 2, state, base)
    assert events.count("checkpoint.base.unreadable") == 1
    assert counts(other)[1] == 0
    assert_same_state(load(tmp_path, 2, state), state)
    assert_same_state(load(tmp_path, 1, before), before)


def damage(root: pathlib.Path, step: int, at: int = 1000) -> str:
    """Flip a bit in the only data file of a save; returns the file's name."""
    path = data_file(root / name_of(step))
    flip(path, at)
    return path.name


def test_unreadable_stored_base_makes_the_save_full(tmp_path, events):
    first = mixed()
    save(tmp_path, 1, first)
    base = stored(tmp_path, 1)
    damage(tmp_path, 1)
    second = moved(first, 1)
    other = save(tmp_path, 2, second, base, thread_count=1)
    assert counts(other)[1:] == (0, 0)
    assert events == ["checkpoint.base.unreadable"]
    assert_same_state(load(tmp_path, 2, second), second)


@pytest.mark.parametrize("how", ["missing", "short"])
def test_removed_base_fails_the_save_and_leaves_no_files(tmp_path, how):
    first = mixed()
    base = save(tmp_path, 1, first).written_base(name_of(1))
    path = data_file(tmp_path / name_of(1))
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    error = failure_of(save, tmp_path, 2, moved(first, 1), base)
    assert type(error) is BaseGoneError
    assert path.name in str(error)
    assert isinstance(pickle.loads(pickle.dumps(error)), BaseGoneError)
    assert list((tmp_path / name_of(2)).iterdir()) == []
    assert path.exists() == (how == "short")


def planned(value: dict[str, Any]) -> tuple[Any, Any, Any]:
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(value, None, True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    return planner, plan, metadata


def ready(writer: CheckpointWriter, rank: int = 0) -> CheckpointWriter:
    writer.storage_meta()
    writer.set_up_storage_writer(not rank, rank=rank, use_collectives=True)
    writer.prepare_local_plan(None)
    return writer


def test_removed_base_of_another_rank_fails_the_save_of_a_coordinator_without_one(tmp_path):
    """A rank that wrote nothing has no base."""
    planner, plan, metadata = planned({"w": torch.arange(100_000.0)})
    first = ready(CheckpointWriter(tmp_path / "one", keep_base=True))
    first.finish(metadata, [first.write_data(plan, planner).wait()])
    other = ready(CheckpointWriter(tmp_path / "two", base=first.written_base("one")), rank=1)
    results = other.write_data(plan, planner).wait()
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(BaseGoneError):
        ready(CheckpointWriter(tmp_path / "two")).finish(metadata, [[], results])
    assert not list((tmp_path / "two").glob("manifest*"))


@pytest.mark.parametrize("fails", [False, True])
def test_files_of_both_ranks_that_wrote_an_item_are_named_or_removed(tmp_path, fails):
    planner, plan, metadata = planned({"w": [1, 2, 3]})
    writers = [ready(CheckpointWriter(tmp_path / "c"), rank) for rank in (0, 1)]
    results = [writer.write_data(plan, planner).wait() for writer in writers]
    if fails:
        metadata.state_dict_metadata["missing"] = metadata.state_dict_metadata["w"]
        with pytest.raises(UsageError, match="missing"):
            writers[0].finish(metadata, results)
        assert not list((tmp_path / "c").glob("data-*"))
        return
    writers[0].finish(metadata, results)
    named = {file.name for file in read_manifest(open_storage(tmp_path / "c")).manifest.files}
    assert named == {path.name for path in (tmp_path / "c").glob("data-*")}
    assert len(named) == 2


def test_damaged_base_is_detected_by_a_reader_of_the_delta(tmp_path):
    first = mixed()
    base = save(tmp_path, 1, first).written_base(name_of(1))
    second = moved(first, 1)
    save(tmp_path, 2, second, base)
    name = damage(tmp_path, 1)
    error = failure_of(load, tmp_path, 2, second)
    assert type(error) is CorruptCheckpointError
    assert f"../{name_of(1)}/{name}" in str(error)
    (tmp_path / name_of(1) / name).unlink()
    error = failure_of(load, tmp_path, 2, second)
    assert type(error) is CorruptCheckpointError
    assert f"../{name_of(1)}/{name}" in str(error)


def test_delta_that_would_replace_its_base_is_refused(tmp_path):
    state = mixed()
    base = save(tmp_path, 1, state).written_base(name_of(1))
    assert isinstance(failure_of(save, tmp_path, 1, moved(state, 1), base), UsageError)
    assert_same_state(load(tmp_path, 1, state), state)


def test_overwriting_save_keeps_the_files_of_siblings(tmp_path):
    """Neither the replaced delta nor the failed one may remove files of its base."""
    first = mixed()
    base = save(tmp_path, 1, first).written_base(name_of(1))
    save(tmp_path, 2, moved(first, 1), base)
    save(tmp_path, 2, moved(first, 2), base)
    save(tmp_path, 2, {"other": torch.zeros(3)})
    writer = CheckpointWriter(tmp_path / name_of(3), base=base)
    dcp.save(first, storage_writer=writer)
    writer.abandon()
    assert_same_state(load(tmp_path, 1, first), first)


class Masked(StreamTransformExtension):
    """An extension that changes every byte."""

    mask = 1

    @classmethod
    def registry_name(cls) -> str:
        return "masked"

    def get_descriptor(self) -> str:
        return f"masked/{self.mask}"

    @staticmethod
    def from_descriptor(version: str):
        return Masked()

    def transform_to(self, output):
        return _Masking(output, self.mask)

    def transform_from(self, input):
        return io.BytesIO(bytes(byte ^ self.mask for byte in input.read()))


class Otherwise(Masked):
    mask = 2


class _Masking(io.RawIOBase):
    def __init__(self, output, mask):
        self.output, self.mask = output, mask

    def writable(self):
        return True

    def write(self, data):
        self.output.write(bytes(byte ^ self.mask for byte in data))
        return len(data)


class Registry:
    def from_descriptor_list(self, descriptors):
        return [Otherwise() if name.endswith("2") else Masked() for name in descriptors]


class _Doubling(_Masking):
    def write(self, data):
        self.output.write(data)
        return super().write(data)


class Doubled(Masked):
    def transform_to(self, output):
        return _Doubling(output, self.mask)


def test_extension_that_lengthens_chunks_more_than_readers_accept_fails_the_save(tmp_path):
    noise = torch.randint(256, (300_000,), dtype=torch.uint8)
    error = failure_of(dcp.save, {"x": noise}, storage_writer=CheckpointWriter(tmp_path, _extensions=[Doubled()]))
    assert isinstance(error, UsageError)
    assert "masked/1 made 600" in str(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["memory", "stored"])
def test_delta_with_stream_extension_uses_only_a_base_with_the_same_one(tmp_path, kind, events):
    first = {"w": weights(60_000), "frozen": weights(50_000, 1)}
    second = {**first, "w": nudged(first["w"], 1)}
    writer = save(tmp_path, 1, first, _extensions=[Masked()])
    base = writer.written_base(name_of(1)) if kind == "memory" else stored(tmp_path, 1, extension_registry=Registry())
    other = save(tmp_path, 2, second, base, _extensions=[Masked()])
    assert counts(other) == (0, 1, 1)
    # With others, or none, no chunk of the base can be referred to.
    for step, extensions in ((3, [Otherwise()]), (4, [])):
        assert counts(save(tmp_path, step, second, base, _extensions=extensions)) == (2, 0, 0)
    assert events == ["checkpoint.base.unusable"] * 2
    for step in (2, 3, 4):
        assert_same_state(load(tmp_path, step, second, _extension_registry=Registry()), second)


def test_base_kept_by_writer_is_used_once(tmp_path):
    with pytest.raises(UsageError, match="keep_base=True"):
        CheckpointWriter(tmp_path).written_base("step-1")
    writer = save(tmp_path, 1, {"w": weights(10)})
    assert writer.written_base(name_of(1)) is not None
    assert writer.written_base(name_of(1)) is None
    assert save(tmp_path, 2, {}).written_base(name_of(2)) is None


def test_unpickled_writer_saves_a_full_checkpoint(tmp_path):
    state = {"w": weights(60_000)}
    base = save(tmp_path, 1, state).written_base(name_of(1))
    writer = pickle.loads(pickle.dumps(CheckpointWriter(tmp_path / name_of(2), base=base)))
    dcp.save(state, storage_writer=writer)
    assert counts(writer) == (1, 0, 0)


def test_files_without_a_base_are_unchanged(tmp_path):
    """The files are equal whether a writer keeps a base, or has a base without matching chunks."""
    state, nothing = mixed(), save(tmp_path, 9, {"other": torch.ones(3)}).written_base(name_of(9))
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / name_of(0), sync_files=False))
    save(tmp_path, 1, state)
    save(tmp_path, 2, state, nothing)
    contents = [next((tmp_path / name_of(step)).glob("data-*")).read_bytes() for step in range(3)]
    assert contents[0] == contents[1] == contents[2]
    manifests = [read_manifest(open_storage(tmp_path / name_of(step))).manifest for step in range(3)]
    assert manifests[0].chunks.to_bytes() == manifests[1].chunks.to_bytes() == manifests[2].chunks.to_bytes()
    assert [len(manifest.files) for manifest in manifests] == [1, 1, 1]


# --- an object store ------------------------------------------------------------------------------


@pytest.mark.slow
def test_chain_is_read_in_few_requests_and_each_byte_once(tmp_path):
    state = {f"layer.{number}": weights(2_000_000, number) for number in range(4)} | {"frozen": weights(2_000_000, 9)}
    with (
        S3Server(tmp_path / "server") as server,
        EmulatedRegion(server.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region,
    ):
        server.create_bucket("runs")
        options = {**server.target_options, "endpoint_url": region.endpoint_url}
        base, full_bytes = None, 0
        for step in range(5):
            url = f"s3://runs/chain/{name_of(step)}"
            writer = CheckpointWriter(url, target_options=options, base=base, keep_base=True, restore_limit=10.0)
            dcp.save(state, storage_writer=writer)
            base = writer.written_base(name_of(step))
            full_bytes = full_bytes or writer.stats.stored_bytes
            if step < 4:
                state = {key: value if key == "frozen" else nudged(value, step) for key, value in state.items()}
        assert writer.stats.chunks_delta == 32
        before = region.stats()
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(loaded, storage_reader=CheckpointReader(url, target_options=options))
        after = region.stats()
    assert_same_state(loaded, state)
    moved_bytes = after.bytes_down - before.bytes_down
    assert writer.stats.restore_bytes > full_bytes
    # The manifest, and headers of the requests.
    assert writer.stats.restore_bytes <= moved_bytes <= writer.stats.restore_bytes + 200_000
    # Five files: at most as many ranges a group as files, and one HEAD each.
    groups = 2 + writer.stats.restore_bytes // (8 << 20)
    requests = {
        kind: after.by_kind[kind].requests - (before.by_kind[kind].requests if kind in before.by_kind else 0)
        for kind in ("GET", "HEAD")
    }
    assert requests["GET"] <= 5 * groups
    assert requests["HEAD"] <= 5 + 4


# --- several ranks (this file is their program) ---------------------------------------------------


def run_chain(root: pathlib.Path) -> None:
    """Two ranks save a chain, and continue with it from its files, as after a restart."""
    import torch.distributed as dist

    base = None
    for step in range(4):
        writer = CheckpointWriter(root / name_of(step), base=base, keep_base=True, sync_files=False)
        dcp.save(ranks_module.sharded(rank_state(step)), storage_writer=writer)
        base = writer.written_base(name_of(step)) if step != 1 else stored(root, 1)
        if step:
            assert writer.stats.chunks_full < writer.stats.chunks, dist.get_rank()
    loaded = ranks_module.sharded(ranks_module.zeroed(rank_state(3)), turned=True)
    dcp.load(loaded, storage_reader=CheckpointReader(root / name_of(3)))
    assert_same_state(gathered(loaded), rank_state(3))


def run_other_ranks(root: pathlib.Path) -> None:
    """Four ranks continue after two: every shard is different, everything else is equal."""
    loaded = ranks_module.sharded(ranks_module.zeroed(rank_state(3)))
    dcp.load(loaded, storage_reader=CheckpointReader(root / name_of(3)))
    writer = CheckpointWriter(root / name_of(4), base=stored(root, 3), sync_files=False)
    dcp.save(loaded, storage_writer=writer)


def rank_state(step: int) -> dict:
    state = ranks_module.whole()
    for number in range(step):
        state["rows"] = nudged(state["rows"], number)
        state["columns"] = nudged(state["columns"], number)
    return state


@pytest.mark.slow
def test_deltas_of_two_ranks_are_loaded_by_other_numbers_of_ranks(tmp_path):
    ranks.run(__file__, "chain", 2, tmp_path)
    for step in range(4):
        loaded = ranks_module.zeroed(rank_state(step))
        dcp.load(loaded, storage_reader=CheckpointReader(tmp_path / name_of(step)))
        assert_same_state(loaded, rank_state(step))
    manifest = read_manifest(open_storage(tmp_path / name_of(3))).manifest
    assert len({file.name for file in manifest.files}) == len(manifest.files)
    ranks.run(__file__, "others", 4, tmp_path)
    loaded = ranks_module.zeroed(rank_state(3))
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path / name_of(4)))
    assert_same_state(loaded, rank_state(3))


if __name__ == "__main__":
    ranks.main({"chain": run_chain, "others": run_other_ranks})
