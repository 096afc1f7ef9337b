"""`CheckpointWriter` and `CheckpointReader` under torch.distributed.checkpoint itself: one process."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import random
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.checkpoints import data_file
from tests.support.failures import failure_of
from tests.support.states import assert_same_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from millrace.checkpoint import CheckpointReader, CheckpointWriter, describe
from millrace.checkpoint.format import manifest
from millrace.checkpoint.format.manifest import DTYPES
from millrace.checkpoint.writing import writer as writer_module
from millrace.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    ObjectExistsError,
    UnsupportedFormatError,
    UnsupportedObjectError,
    UsageError,
)
from millrace.origin import open_origin

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


FIXTURE = pathlib.Path(__file__).parents[2] / "fixtures" / "checkpoint-v1"


def save(state, path, planner=None, **options):
    writer = CheckpointWriter(path, **options)
    dcp.save(state, storage_writer=writer, planner=planner)
    return writer


def load(state, path, **options):
    dcp.load(state, storage_reader=CheckpointReader(path, **options))
    return state


def emptied(value):
    """The same structure with other values, to be loaded into."""
    if isinstance(value, torch.Tensor):
        # By its bytes: torch cannot fill every dtype.
        return (
            torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8).view(value.dtype).reshape(value.shape)
        )
    if isinstance(value, dict):
        return type(value)((key, emptied(member)) for key, member in value.items())
    if isinstance(value, list):
        return [emptied(member) for member in value]
    return "other"


def noise(dtype, *shape, seed=0):
    """Every bit pattern, NaNs with payloads included (bools: 0 and 1 only)."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, limit, (count * itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_is_loaded_bit_for_bit(tmp_path, name):
    dtype = getattr(torch, name)
    state = {
        "large": noise(dtype, 401, 333),
        "small": noise(dtype, 3, 5),
        "scalar": noise(dtype),
        "empty": noise(dtype, 0, 7),
        "zeros": torch.zeros(70_000, dtype=torch.uint8).view(dtype),
    }
    save(state, tmp_path)
    assert_same_state(load(emptied(state), tmp_path), state)


def test_unsupported_dtypes_of_torch_are_the_known_ones():
    """A dtype that a newer torch brings belongs into the format, or into this list, and not in between."""
    there = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantised = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    # Torch's own save planner fails on them: it needs a size that torch does not return.
    shells = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    shells |= {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    assert there - set(DTYPES) == quantised | shells
    for name in shells & there:
        with pytest.raises(TypeError):
            torch._utils._element_size(getattr(torch, name))


@pytest.mark.filterwarnings("ignore:.*quantized.*|.*TypedStorage.*")
def test_quantised_tensor_fails_the_save(tmp_path):
    error = failure_of(save, {"q": torch.quantize_per_tensor(torch.ones(9), 0.1, 0, torch.quint8)}, tmp_path)
    assert isinstance(error, UnsupportedObjectError)
    assert "'q'" in str(error)


def test_strides_views_and_lazy_bits_are_loaded(tmp_path):
    base = torch.randn(300, 200)
    pairs = torch.randn(64, 50, dtype=torch.complex64)
    state = {
        "transposed": base.t(),
        "rows": base[7:9],
        "columns": base[:, 3:150:7],
        "flipped view": base.flatten()[5:105:3],
        "expanded": torch.randn(1, 9).expand(40, 9),
        "channels last": torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last),
        "conj": pairs.conj(),
        "neg": pairs.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(5)),
    }
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    save(state, tmp_path)
    expected = {**state, "parameter": state["parameter"].detach()}
    assert_same_state(load(emptied(state), tmp_path), expected)
    # The destinations may be as odd as the sources.
    target = {key: torch.zeros_like(value) for key, value in emptied(state).items()}
    target["transposed"] = torch.zeros(300, 200).t()
    target["rows"] = torch.zeros(4, 400)[::2, 100:300]
    target["conj"] = torch.zeros(64, 50, dtype=torch.complex64).conj()
    assert_same_state(load(target, tmp_path), expected)


def test_objects_of_a_training_run_are_loaded(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(7, 300), torch.nn.LayerNorm(300), torch.nn.Linear(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(5, 7)).square().mean().backward()
        optimizer.step()
        schedule.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": torch.get_rng_state(),
        "python rng": random.getstate()[1][:5],
        "step": 17,
        "loss": 0.25,
        "name": "run ü",
        "nothing": None,
        "flag": True,
        "list": [1, "two", None, torch.arange(3)],
        "ordered": collections.OrderedDict(b=1, a=torch.ones(2)),
        "odd key.with.dots": {"x.y": 5, "3": 4},
        "bytes": b"abc",
    }
    save(state, tmp_path)
    loaded = load(emptied(state), tmp_path)
    assert_same_state(loaded, state)
    for group, expected in zip(loaded["optimizer"]["param_groups"], optimizer.param_groups, strict=True):
        assert group["betas"] == expected["betas"]
    summary = CheckpointReader(tmp_path).summary()
    assert summary == describe(tmp_path)
    assert summary.format_version == 1
    assert summary.tensors > 10
    assert summary.objects > 10
    assert summary.stored_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_stateful_object_is_loaded_with_and_without_a_template(tmp_path):
    model = torch.nn.Linear(3, 4)
    save({"model": model}, tmp_path)
    other = torch.nn.Linear(3, 4)
    load({"model": other}, tmp_path)
    assert_same_state(dict(other.state_dict()), dict(model.state_dict()))
    whole = _load_state_dict_from_keys(storage_reader=CheckpointReader(tmp_path))
    assert_same_state(dict(whole["model"]), dict(model.state_dict()))


def test_load_into_other_dtype_converts_like_torch(tmp_path):
    state = {"x": torch.randn(1000)}
    save(state, tmp_path)
    assert torch.equal(load({"x": torch.zeros(1000, dtype=torch.bfloat16)}, tmp_path)["x"], state["x"].bfloat16())


def test_small_tensors_share_chunks(tmp_path):
    state = {f"layer.{n}": torch.randn(n % 40) for n in range(3000)}
    assert save(state, tmp_path).stats.chunks == 1
    assert_same_state(load(emptied(state), tmp_path), state)


def test_large_tensor_is_divided_into_chunks(tmp_path):
    state = {"x": torch.randn(1 << 19, 3)[:, :2], "y": torch.randn(700_001).bfloat16()}
    stats = save(state, tmp_path, thread_count=4).stats
    assert stats.chunks == 4 + 2
    assert stats.raw_bytes == (1 << 22) + 1_400_002
    assert stats.stored_bytes < 0.9 * stats.raw_bytes
    assert_same_state(load(emptied(state), tmp_path, thread_count=3), state)


# --- overwriting, names, options ------------------------------------------------------------------


def test_overwriting_replaces_the_files(tmp_path):
    first, second = {"x": torch.randn(5000)}, {"x": torch.randn(9000), "y": 1}
    writer = save(first, tmp_path)
    before = {file.name for file in tmp_path.iterdir()}
    dcp.save(second, storage_writer=writer)
    after = {file.name for file in tmp_path.iterdir()}
    assert_same_state(load(emptied(second), tmp_path), second)
    assert before & after == {"manifest.millrace"}
    assert len(after) == 2


def test_save_without_overwrite_keeps_an_existing_checkpoint(tmp_path):
    state = {"x": torch.randn(50)}
    save(state, tmp_path, overwrite=False)
    kept = {file.name for file in tmp_path.iterdir()}
    error = failure_of(save, {"x": torch.zeros(50)}, tmp_path, overwrite=False)
    assert isinstance(error, ObjectExistsError)
    assert "overwrite=True" in str(error)
    assert {file.name for file in tmp_path.iterdir()} == kept
    assert_same_state(load(emptied(state), tmp_path), state)


def test_checkpoint_published_meanwhile_is_kept(tmp_path, monkeypatch):
    state = {"x": torch.randn(50)}
    monkeypatch.setattr(writer_module, "refuse_existing", lambda *_: None)
    save(state, tmp_path, overwrite=False)
    assert isinstance(failure_of(save, {"x": torch.zeros(50)}, tmp_path, overwrite=False), ObjectExistsError)
    assert_same_state(load(emptied(state), tmp_path), state)


def test_checkpoint_id_selects_the_place_of_writer_and_reader(tmp_path):
    state = {"x": torch.randn(50)}
    dcp.save(state, checkpoint_id=tmp_path / "b", storage_writer=CheckpointWriter(tmp_path / "a"))
    loaded = emptied(state)
    dcp.load(loaded, checkpoint_id=tmp_path / "b", storage_reader=CheckpointReader(tmp_path / "a"))
    assert_same_state(loaded, state)
    assert not (tmp_path / "a").exists()
    assert CheckpointWriter.validate_checkpoint_id("s3://bucket/x")
    assert CheckpointReader.validate_checkpoint_id(tmp_path)
    assert not CheckpointWriter.validate_checkpoint_id("nope://bucket/x")
    assert not CheckpointReader.validate_checkpoint_id("nope://bucket/x")


def test_stock_arguments_without_meaning_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointWriter(tmp_path, single_file_per_rank=True, sync_files=False, thread_count=2, overwrite=True)
    for option in (
        {"single_file_per_rank": False},
        {"per_thread_copy_ahead": 1},
        {"serialization_format": dcp.filesystem.SerializationFormat.SAFETENSORS},
    ):
        with pytest.warns(UserWarning, match=f"{next(iter(option))} has no effect") as seen:
            CheckpointWriter(tmp_path, **option)
        assert len(seen) == 1
    for kind in (CheckpointWriter, CheckpointReader):
        with pytest.raises(ConfigurationError):
            kind(tmp_path, thread_count=0)


def test_unpickled_writer_and_reader_save_and_load(tmp_path):
    state = {"x": torch.randn(50)}
    writer = pickle.loads(pickle.dumps(save(state, tmp_path)))
    dcp.save(state, storage_writer=writer)
    reader = CheckpointReader(tmp_path)
    reader.summary()
    loaded = emptied(state)
    dcp.load(loaded, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert_same_state(loaded, state)
    assert "secret" not in repr(CheckpointWriter("s3://b/x", target_options={"key": "k", "secret": "secret"}))


def test_user_metadata_is_kept(tmp_path):
    save({"x": torch.ones(1)}, tmp_path, user_metadata={"step": 5, "shape": (1, 2)})
    assert describe(tmp_path).user == {"step": 5, "shape": (1, 2)}
    error = failure_of(save, {"x": torch.ones(1)}, tmp_path, user_metadata={"step": object()})
    assert isinstance(error, UnsupportedObjectError)
    assert describe(tmp_path).user["step"] == 5


def test_save_whose_manifest_readers_would_refuse_fails_and_keeps_the_previous_one(tmp_path, monkeypatch):
    save({"x": torch.ones(1)}, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "MAX_MANIFEST_BYTES", 1 << 20)
        for text in ("x" * (5 << 20), random.Random(0).randbytes(2 << 20)):
            error = failure_of(save, {"x": torch.zeros(1)}, tmp_path, user_metadata={"text": text})
            assert isinstance(error, UnsupportedObjectError)
            assert "more than readers accept" in str(error)
    loaded = {"x": torch.zeros(1)}
    load(loaded, tmp_path)
    assert loaded["x"].item() == 1


# --- async, plan caching --------------------------------------------------------------------------


def test_async_save_is_loaded(tmp_path):
    state = {"x": torch.randn(300_000), "n": 3}
    expected = {"x": state["x"].clone(), "n": 3}
    writer = CheckpointWriter(tmp_path)
    future = dcp.async_save(state, storage_writer=writer)
    state["x"].zero_()
    future.result()
    assert_same_state(load(emptied(expected), tmp_path), expected)


def test_failed_async_save_raises(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    future = dcp.async_save({"x": torch.ones(3)}, storage_writer=CheckpointWriter(tmp_path / "file" / "below"))
    with pytest.raises(CheckpointException):
        future.result()


def test_cached_plan_saves_the_same_state(tmp_path):
    for step in range(3):
        state = {"x": torch.randn(1000) + step, "big": torch.randn(200_000), "n": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(state, tmp_path / str(step), planner)
        save(state, tmp_path / "same", planner)
        assert_same_state(load(emptied(state), tmp_path / str(step)), state)
        assert_same_state(load(emptied(state), tmp_path / "same"), state)


# --- objects that are not safe --------------------------------------------------------------------


class Hyperparameters:
    def __init__(self, rate):
        self.rate = rate

    def __eq__(self, other):
        return self.rate == other.rate


def test_object_refused_by_the_safe_loader_fails_the_save(tmp_path):
    state = {"x": torch.randn(5), "good": 1}
    save(state, tmp_path)
    error = failure_of(save, {"x": torch.zeros(5), "hyper": {"deep": Hyperparameters(3)}}, tmp_path)
    assert isinstance(error, UnsupportedObjectError)
    assert "hyper.deep" in str(error)
    assert "trusted_types" in str(error)
    assert_same_state(load(emptied(state), tmp_path), state)
    assert len(list(tmp_path.iterdir())) == 2


def test_trusted_types_are_admitted(tmp_path):
    state = {"hyper": Hyperparameters(3)}
    save(state, tmp_path, trusted_types=[Hyperparameters])
    error = failure_of(load, {"hyper": None}, tmp_path)
    assert isinstance(error, UnsupportedObjectError)
    assert load({"hyper": None}, tmp_path, trusted_types=[Hyperparameters])["hyper"] == Hyperparameters(3)


def test_torchs_own_safe_globals_are_admitted(tmp_path):
    state = {"hyper": Hyperparameters(3)}
    with torch.serialization.safe_globals([Hyperparameters]):
        save(state, tmp_path)
        assert load({"hyper": None}, tmp_path)["hyper"] == Hyperparameters(3)
        # A save with other trusted types does not remove them.
        save(state, tmp_path, trusted_types=[set])
        assert Hyperparameters in torch.serialization.get_safe_globals()
    assert isinstance(failure_of(load, {"hyper": None}, tmp_path), UnsupportedObjectError)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_without_plain_values_fail_the_save(tmp_path):
    for name, tensor in {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
    }.items():
        error = failure_of(save, {"fine": torch.ones(2), name: tensor}, tmp_path)
        assert isinstance(error, UnsupportedObjectError), error
        assert name in str(error)
    assert list(tmp_path.iterdir()) == []


class ChangingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item):
        return super().resolve_data(write_item).to(torch.float16)


class ForgetfulPlanner(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return [dcp.SavePlan(plan.items[1:]) for plan in plans], metadata


def test_planner_with_inconsistent_data_fails_the_save(tmp_path):
    state = {"x": torch.ones(3), "y": torch.ones(3)}
    for planner in (ChangingPlanner(), ForgetfulPlanner()):
        error = failure_of(save, state, tmp_path, planner)
        assert isinstance(error, UsageError)
        assert "'x'" in str(error)


# --- missing and foreign checkpoints --------------------------------------------------------------


def test_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"no complete checkpoint at .*nowhere"):
        describe(tmp_path / "nowhere")
    assert isinstance(failure_of(load, {"x": torch.ones(1)}, tmp_path / "nowhere"), CheckpointNotFoundError)


def test_data_without_manifest_is_not_a_checkpoint(tmp_path):
    state = {"x": torch.randn(50)}
    save(state, tmp_path)
    (tmp_path / "manifest.millrace").unlink()
    with pytest.raises(CheckpointNotFoundError, match="did not finish"):
        CheckpointReader(tmp_path).read_metadata()


def test_load_with_missing_or_short_data_file_raises(tmp_path):
    state = {"x": torch.randn(5000)}
    save(state, tmp_path)
    data = data_file(tmp_path)
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    assert isinstance(failure_of(load, emptied(state), tmp_path), CorruptCheckpointError)
    data.unlink()
    error = failure_of(load, emptied(state), tmp_path)
    assert isinstance(error, CorruptCheckpointError)
    assert "the data file" in str(error)


def test_load_with_any_flipped_bit_raises(tmp_path):
    state = {"x": torch.randn(700), "h": torch.randn(500).bfloat16(), "n": 3, "i": torch.arange(300)}
    save(state, tmp_path)
    generator = random.Random(0)
    for file in tmp_path.iterdir():
        content = bytearray(file.read_bytes())
        for _ in range(40):
            bit = generator.randrange(len(content) * 8)
            content[bit // 8] ^= 1 << bit % 8
            file.write_bytes(content)
            error = failure_of(load, emptied(state), tmp_path)
            assert isinstance(error, CorruptCheckpointError)
            content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
    assert_same_state(load(emptied(state), tmp_path), state)


def test_newer_format_is_not_overwritten(tmp_path):
    from millrace.checkpoint.codec.chunks import checksum

    state = {"x": torch.ones(3)}
    save(state, tmp_path)
    manifest = tmp_path / "manifest.millrace"
    content = bytearray(manifest.read_bytes()[:-8])
    content[8] = 9
    manifest.write_bytes(content + checksum(content).to_bytes(8, "little"))
    error = failure_of(load, emptied(state), tmp_path)
    assert isinstance(error, UnsupportedFormatError)
    assert str(tmp_path) in str(error)


@pytest.mark.parametrize("zstd", [False, True])
def test_stock_checkpoints_are_read(tmp_path, zstd):
    from torch.distributed.checkpoint._extension import ZStandard

    state = {"m": {"x": torch.randn(300, 7), "h": torch.randn(9).bfloat16()}, "n": 3, "l": [1, torch.ones(2)]}
    extensions = [ZStandard()] if zstd else None
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=extensions))
    assert_same_state(load(emptied(state), tmp_path), state)
    assert_same_state(load(emptied(state), tmp_path, origin=open_origin("file")), state)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("foreign code ran",))


def test_stock_checkpoint_runs_no_foreign_code(tmp_path):
    dcp.save({"x": torch.ones(1), "trap": 5}, storage_writer=dcp.FileSystemWriter(tmp_path / "blob"))
    (data,) = (tmp_path / "blob").glob("*.distcp")
    metadata = pickle.loads((tmp_path / "blob" / ".metadata").read_bytes())
    trap = io.BytesIO()
    torch.save(Trap(), trap)
    for index, info in metadata.storage_data.items():
        if index.fqn == "trap":
            info.offset, info.length = data.stat().st_size, len(trap.getvalue())
    data.write_bytes(data.read_bytes() + trap.getvalue())
    (tmp_path / "blob" / ".metadata").write_bytes(pickle.dumps(metadata))
    error = failure_of(load, {"x": torch.zeros(1), "trap": 0}, tmp_path / "blob")
    assert isinstance(error, UnsupportedObjectError)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / ".metadata").write_bytes(pickle.dumps(Trap()))
    assert isinstance(failure_of(load, {"x": torch.zeros(1)}, tmp_path / "meta"), UnsupportedObjectError)


# --- format version 1, as it was written ----------------------------------------------------------


def fixture_state() -> dict:
    # Only arithmetic that every machine rounds alike.
    counting = torch.arange(2000, dtype=torch.float32)
    return {
        "model": {
            "weight": counting.reshape(40, 50) * 0.0123,
            "half": (counting * -0.37).bfloat16(),
            "long": counting.long() * 12345,
            "mask": counting % 3 == 0,
            "phase": torch.complex(counting[:9], -counting[:9]),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(-0.0),
        },
        "step": 41,
        "history": [1, None, "ü", 2.5, torch.ones(2, dtype=torch.float16)],
    }


def test_fixture_of_version_1_is_read(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "copy")
    state, expected = fixture_state(), fixture_state()
    for tensor in [*state["model"].values(), state["history"][4]]:
        tensor.zero_()
    state["step"], state["history"][:4] = 0, [0, 0, 0, 0]
    load(state, tmp_path / "copy")
    assert state["step"] == 41
    assert state["history"][:4] == expected["history"][:4]
    for name, tensor in expected["model"].items():
        assert torch.equal(state["model"][name], tensor), name
    assert torch.signbit(state["model"]["scalar"])
    assert torch.equal(state["history"][4], expected["history"][4])
    summary = describe(FIXTURE)
    assert (summary.format_version, summary.user) == (1, {"fixture": True})
