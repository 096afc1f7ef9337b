"""Tensor subclasses that keep their values in inner tensors, and values that no checkpoint can hold."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.support import ranks
from tests.support.wrappers import Opaque, Scaled, Settings, contents, emptied, scaled
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.two_tensor import TwoTensor

from millrace.checkpoint import (
    CheckpointLoadPlanner,
    CheckpointManager,
    CheckpointReader,
    CheckpointSavePlanner,
    CheckpointStager,
    CheckpointWriter,
    diff_checkpoints,
    export_checkpoint,
    verify_checkpoint,
)
from millrace.checkpoint.state.wrappers import decode_recipe, encode_recipe, take_apart
from millrace.cli import main
from millrace.errors import CorruptCheckpointError, StateMismatchError, UnsupportedObjectError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

PLANNERS = [
    pytest.param(None, None, id="torch"),
    pytest.param(CheckpointSavePlanner, CheckpointLoadPlanner, id="ours"),
]


def two(*shape: int) -> TwoTensor:
    return TwoTensor(torch.randn(shape), torch.randn(shape))


def values() -> dict:
    return {
        "model": {
            "scaled": scaled(5, 7),
            "large": scaled(1100, 1000),
            "two": two(3, 4),
            "columns": TwoTensor(torch.randn(3, 4).t(), torch.randn(3, 4).t()),
            "nested": TwoTensor(two(2, 2), two(2, 2)),
            "none": two(0, 3),
            "scalar": two(),
            "plain": torch.randn(4),
        },
        "step": 7,
    }


def template(state: dict) -> dict:
    return {"model": {key: emptied(value) for key, value in state["model"].items()}, "step": 0}


def assert_same_contents(one: dict, other: dict) -> None:
    assert list(one["model"]) == list(other["model"])
    for key, value in one["model"].items():
        assert contents(value) == contents(other["model"][key]), key
    assert one["step"] == other["step"]


def error_of(call, *args, **options):
    """Of a check before the save or load, or of rank 0."""
    with pytest.raises((CheckpointException, UnsupportedObjectError, StateMismatchError)) as caught:
        call(*args, **options)
    failures = getattr(caught.value, "failures", None)
    return failures[0][0] if failures else caught.value


def save(path, state, planner=None, **options):
    dcp.save(state, storage_writer=CheckpointWriter(path, **options), planner=planner and planner())


def load(path, state, planner=None, **options):
    dcp.load(state, storage_reader=CheckpointReader(path, **options), planner=planner and planner())


@pytest.mark.parametrize(("save_planner", "load_planner"), PLANNERS)
def test_wrapper_tensors_loaded_in_place_are_the_same_bit_for_bit(tmp_path, save_planner, load_planner):
    state = values()
    save(tmp_path / "c", state, save_planner)
    assert verify_checkpoint(str(tmp_path / "c")).ok
    loaded = template(state)
    kept = dict(loaded["model"])
    inner = loaded["model"]["scaled"].values_
    load(tmp_path / "c", loaded, load_planner)
    assert_same_contents(state, loaded)
    assert all(loaded["model"][key] is value for key, value in kept.items())
    assert loaded["model"]["scaled"].values_ is inner


def test_inner_tensors_are_compressed_by_the_codec(tmp_path):
    state = {"w": Scaled(torch.zeros(1000, 1000, dtype=torch.int8), torch.ones(1000), None, torch.float32)}
    writer = CheckpointWriter(tmp_path / "c")
    dcp.save(state, storage_writer=writer)
    assert writer.stats is not None
    assert writer.stats.raw_bytes > 1_000_000 > 50_000 > writer.stats.stored_bytes


def test_wrapper_tensors_load_as_torch_loads_them(tmp_path):
    # Into a plain tensor, and into another wrapper of the same class: what the class itself makes of it.
    state = {"w": scaled(5, 7), "two": two(3, 4)}
    save(tmp_path / "ours", state)
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    for target in (torch.zeros(5, 7), torch.zeros(5, 7, dtype=torch.bfloat16), emptied(state["w"])):
        ours, stock = {"w": copy.deepcopy(target)}, {"w": copy.deepcopy(target)}
        load(tmp_path / "ours", ours, trusted_types=[Scaled])
        with torch.serialization.safe_globals([Scaled]):
            dcp.load(stock, checkpoint_id=tmp_path / "stock")
        assert contents(ours["w"]) == contents(stock["w"])
        assert not ours["w"].dequantized().isnan().all() if isinstance(target, Scaled) else ours["w"].any()


@pytest.mark.parametrize(("save_planner", "load_planner"), PLANNERS)
def test_template_refused_by_its_class_is_named(tmp_path, save_planner, load_planner):
    save(tmp_path / "c", {"w": scaled(5, 7)}, save_planner)
    error = error_of(load, tmp_path / "c", {"w": scaled(5, 7, settings=("other", 4))}, load_planner)
    assert type(error) is StateMismatchError
    assert "'w'" in str(error)
    save(tmp_path / "plain", {"w": torch.ones(5, 7)}, save_planner)
    error = error_of(load, tmp_path / "plain", {"w": scaled(5, 7)}, load_planner)
    assert type(error) is StateMismatchError
    assert "'w'" in str(error)


def test_untrusted_class_is_created_only_if_the_state_has_it(tmp_path):
    state = {"w": scaled(5, 7)}
    save(tmp_path / "c", state)
    error = error_of(load, tmp_path / "c", {"w": torch.zeros(5, 7)})
    assert type(error) is UnsupportedObjectError
    assert str(error).startswith(
        "'w' is a tests.support.wrappers.Scaled, a class that is not trusted: import the library"
    )
    loaded = {"w": emptied(state["w"])}
    load(tmp_path / "c", loaded)
    assert contents(loaded["w"]) == contents(state["w"])
    with torch.serialization.safe_globals([Scaled]):
        load(tmp_path / "c", {"w": torch.zeros(5, 7)})


def test_settings_of_a_foreign_class_are_saved_only_where_it_is_trusted(tmp_path):
    state = {"w": scaled(5, 7, settings=Settings(4))}
    error = error_of(save, tmp_path / "c", state)
    assert type(error) is UnsupportedObjectError
    assert "'w'" in str(error)
    assert "tests.support.wrappers.Settings" in str(error)
    save(tmp_path / "c", state, trusted_types=[Settings])
    loaded = {"w": emptied(state["w"])}
    assert "'w'" in str(error_of(load, tmp_path / "c", loaded))
    load(tmp_path / "c", loaded, trusted_types=[Settings])
    assert contents(loaded["w"]) == contents(state["w"])


def test_value_with_the_key_of_a_part_fails_the_save(tmp_path):
    error = error_of(save, tmp_path / "c", {"w": two(2), "w.a": torch.ones(2)})
    assert type(error) is UnsupportedObjectError
    assert "'w.a'" in str(error)
    assert not (tmp_path / "c" / "manifest.millrace").exists()


# --- managers ---------------------------------------------------------------------------------------------


class Lazily:
    """Has its state only after a first step, as optimizers do."""

    def __init__(self, state: dict | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict:
        return dict(self.state)

    def load_state_dict(self, state: dict) -> None:
        self.state = dict(state)


@pytest.mark.parametrize("is_async", [False, True])
def test_manager_restores_wrapper_tensors_and_their_deltas(tmp_path, is_async):
    state = values()
    with CheckpointManager(tmp_path / "run", independent=False) as run:
        pending = run.save_async(1, state)
        before = copy.deepcopy(state["model"]["scaled"])
        state["model"]["scaled"].values_.add_(1)  # the state was copied
        assert pending.result().kind == "full"
        second = run.save_async(2, state).result() if is_async else run.save(2, state)
        assert second.kind == "delta"
        assert second.chunks_referenced > 0
        loaded = template(state)
        assert run.restore(loaded, 1) == 1
        assert contents(loaded["model"]["scaled"]) == contents(before)
        assert run.restore(loaded) == 2
        assert_same_contents(state, loaded)
    assert verify_checkpoint(str(tmp_path / "run" / "step-000000000002")).ok


def test_empty_stateful_gets_the_wrapper_tensors_of_the_checkpoint(tmp_path):
    moments = {"moments": [{"exp_avg": scaled(4, 4), "plain": torch.ones(2)}, {"exp_avg": two(2, 3)}]}
    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, {"opt": Lazily(moments)})
    fresh = Lazily()
    with CheckpointManager(tmp_path / "run") as run, pytest.raises(UnsupportedObjectError, match=r"'opt\.moments\.0"):
        run.restore({"opt": fresh})
    with CheckpointManager(tmp_path / "run", trusted_types=[Scaled, TwoTensor]) as run:
        assert run.restore({"opt": fresh}) == 1
    for one, other in zip(moments["moments"], fresh.state["moments"], strict=True):
        assert {key: contents(value) for key, value in one.items()} == {
            key: contents(value) for key, value in other.items()
        }


def test_asynchronous_save_copies_wrapper_tensors(tmp_path):
    state = values()
    before = copy.deepcopy(state)
    stager = CheckpointStager()
    future = dcp.async_save(
        state, storage_writer=CheckpointWriter(tmp_path / "c"), async_stager=stager, process_group=None
    )
    for value in (state["model"]["two"].a, state["model"]["columns"].b, state["model"]["nested"].a.b):
        value.zero_()
    future.result()
    stager.close()
    loaded = template(state)
    load(tmp_path / "c", loaded)
    assert_same_contents(before, loaded)


# --- tools ------------------------------------------------------------------------------------------------


def checkpoint(path, writer: str, state: dict) -> str:
    if writer == "ours":
        save(path, state)
    else:
        dcp.save(state, checkpoint_id=path)
    return str(path)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_wrapper_tensors_are_exported(tmp_path, writer):
    state = values()
    url = checkpoint(tmp_path / "c", writer, state)
    trusted = [Scaled, TwoTensor]
    report = export_checkpoint(url, tmp_path / "c.pt", "torch", trusted_types=trusted)
    assert (report.tensors, report.objects) == (8, 1)
    with torch.serialization.safe_globals(trusted):
        assert_same_contents(state, torch.load(tmp_path / "c.pt", weights_only=True))
        export_checkpoint(url, tmp_path / "dcp", "dcp", trusted_types=trusted)
        loaded = template(state)
        dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
        assert_same_contents(state, loaded)
    report = export_checkpoint(url, tmp_path / "c.safetensors", "safetensors", trusted_types=trusted)
    flat = load_file(tmp_path / "c.safetensors")
    assert contents(flat["model.columns.b"]) == contents(state["model"]["columns"].b.contiguous())
    assert contents(flat["model.nested.a.b"]) == contents(state["model"]["nested"].a.b)
    assert contents(flat["model.scaled.scale"]) == contents(state["model"]["scaled"].scale)
    assert "model.scaled" in report.left_out
    # One part names the whole; a safetensors file may hold the part alone.
    report = export_checkpoint(url, tmp_path / "w.pt", "torch", keys=["model.scaled.*"], trusted_types=trusted)
    assert (report.tensors, report.objects) == (1, 0)
    report = export_checkpoint(url, tmp_path / "p", "safetensors", keys=["model.scaled.scale"], trusted_types=trusted)
    assert list(load_file(tmp_path / "p")) == ["model.scaled.scale"]


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_export_of_untrusted_class_names_key_and_class(tmp_path, writer):
    url = checkpoint(tmp_path / "c", writer, {"plain": torch.ones(2), "w": two(3, 4)})
    for to in ("torch", "dcp"):
        with pytest.raises(UnsupportedObjectError, match=r"'w'.*TwoTensor.*not trusted.*trusted_types") as caught:
            export_checkpoint(url, tmp_path / to, to)
        assert "\n" not in str(caught.value)
    assert export_checkpoint(url, tmp_path / "plain", "torch", keys=["plain"]).tensors == 1


def test_checkpoints_with_wrapper_tensors_are_compared(tmp_path):
    state = values()
    stock, ours = (checkpoint(tmp_path / writer, writer, state) for writer in ("stock", "ours"))
    trusted = [Scaled, TwoTensor]
    assert diff_checkpoints(stock, ours, trusted_types=trusted).same
    state["model"]["scaled"].values_[2, 3] += 1
    other = checkpoint(tmp_path / "other", "ours", state)
    for before, options in ((stock, {"trusted_types": trusted}), (ours, {})):
        found = diff_checkpoints(before, other, **options)
        assert [(change.key, change.changed) for change in found.tensors] == [("model.scaled.values_", 1)]
        assert (found.added, found.removed, found.objects) == ((), (), ())


def test_commands_admit_a_class_that_is_named(tmp_path, capsys):
    url = checkpoint(tmp_path / "c", "stock", {"w": two(3, 4)})
    assert main(["checkpoints", "show", url]) == 0
    name = "torch.testing._internal.two_tensor:TwoTensor"
    assert main(["checkpoints", "export", url, str(tmp_path / "c.pt"), "--to", "torch"]) != 0
    assert "--trust on the command line" in capsys.readouterr().err
    assert main(["checkpoints", "export", url, str(tmp_path / "c.pt"), "--to", "torch", "--trust", name]) == 0
    assert main(["checkpoints", "diff", url, url, "--trust", name]) == 0


@pytest.mark.parametrize(
    "name", ["torch", "torch:", "torch:nothing", "torch:float32", "no_such_module:Class", ":x", "..:x"]
)
def test_unimportable_class_is_refused(tmp_path, name):
    from millrace.cli.checkpoints.common import trusted_types
    from millrace.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=r"package\.module:Class"):
        trusted_types([name])


# --- values that cannot be saved --------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["1 / 0", "raise SystemError('no')", "import nothing_of_this_name", "A = 7"])
def test_unimportable_trusted_class_is_named(tmp_path, monkeypatch, capsys, code):
    (tmp_path / "a_broken_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_broken_module", raising=False)
    url = checkpoint(tmp_path / "c", "ours", {"plain": torch.ones(2)})
    arguments = ["export", url, str(tmp_path / "c.pt"), "--to", "torch", "--trust", "a_broken_module:A"]
    assert main(["checkpoints", *arguments]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "--trust a_broken_module:A" in lines[0]


def with_foreign_inside() -> TwoTensor:
    return TwoTensor(Opaque(torch.ones(2)), Opaque(torch.ones(2)))


UNSUPPORTED = {
    "lazy parameter": torch.nn.parameter.UninitializedParameter,
    "lazy buffer": torch.nn.parameter.UninitializedBuffer,
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "csr": lambda: torch.ones(3, 3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "opaque": lambda: Opaque(torch.ones(3)),
    "opaque inside": with_foreign_inside,
    "meta inside": lambda: TwoTensor(torch.ones(3, device="meta"), torch.ones(3, device="meta")),
    "sparse parameter": lambda: torch.nn.Parameter(torch.ones(3).to_sparse()),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_value_is_named(tmp_path, kind):
    state = {"fine": torch.ones(2), "deep": {"odd": UNSUPPORTED[kind]()}}
    errors = [error_of(save, tmp_path / "c", state, CheckpointSavePlanner)]
    with CheckpointManager(tmp_path / "run") as run:
        errors.append(error_of(run.save, 1, state))
        assert run.steps() == []
        run.save(2, {"fine": torch.ones(2)})
    for error in errors:
        assert isinstance(error, UnsupportedObjectError), repr(error)
        assert "'deep.odd" in str(error)
        assert "\n" not in str(error)
        assert error.next_step


def test_class_admitted_by_the_program_stays_admitted_after_save_and_load(tmp_path):
    with torch.serialization.safe_globals([Scaled]):
        save(tmp_path / "c", {"w": scaled(5, 7), "object": [1]}, trusted_types=[Scaled])
        load(tmp_path / "c", {"w": scaled(5, 7), "object": None}, trusted_types=[Scaled])
        assert Scaled in torch.serialization.get_safe_globals()
    assert Scaled not in torch.serialization.get_safe_globals()


# --- forged recipes ---------------------------------------------------------------------------------------


def recipe(**changes) -> bytes:
    wrapper, _ = take_apart(two(2, 2), "w")
    plain = torch.load(io.BytesIO(bytes(encode_recipe(wrapper, "w", ()))), weights_only=True)
    file = io.BytesIO()
    torch.save({**plain, **changes}, file)
    return file.getvalue()


def blob(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        blob([]),
        blob(None),
        blob({}),
        blob(torch.ones(3)),
        recipe(size=None),
        recipe(size=[float("inf")]),
        recipe(stride=torch.ones(2, 2)),
        recipe(parts=[]),
        recipe(parts={"a": 5}),
        recipe(parts={"a": {"stride": "x"}}),
        recipe(parts={"a": {"type": "torch.testing._internal.two_tensor.TwoTensor"}}),
    ],
)
def test_malformed_recipe_raises_corrupt_checkpoint(data):
    with pytest.raises(CorruptCheckpointError, match="the recipe of 'w' is malformed"):
        decode_recipe(data, "w", [TwoTensor], ())


@pytest.mark.parametrize(
    "name", ["os.system", "torch.Tensor", "torch.nn.parameter.Parameter", "tests.support.wrappers.Opaque", ""]
)
def test_recipe_of_untrusted_class_is_refused(name):
    with pytest.raises(UnsupportedObjectError, match="a class that is not trusted"):
        decode_recipe(recipe(type=name), "w", [TwoTensor, Opaque, torch.nn.Parameter], ())


def test_recipe_of_impossible_size_creates_no_tensor():
    wrapper = decode_recipe(recipe(size=(-1, 4)), "w", [TwoTensor], ())
    with pytest.raises(UnsupportedObjectError, match=r"'w' cannot be made a torch\..*TwoTensor again"):
        wrapper.build({"w.a": torch.ones(2, 2), "w.b": torch.ones(2, 2)}, "w")


# --- ranks (this file is its own program) -----------------------------------------------------------------


def sharded(local: TwoTensor, mesh) -> DTensor:
    rows, columns = local.shape
    about = TensorMeta(torch.Size((rows * mesh.size(), columns)), (columns, 1), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=about), requires_grad=False)


def save_and_load_shards(root: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(rank)
    local = two(2, 3)
    for number, (save_planner, load_planner) in enumerate(
        [(None, None), (CheckpointSavePlanner, CheckpointLoadPlanner)]
    ):
        path = root / f"shards-{number}"
        save(path, {"w": sharded(local, mesh)}, save_planner)
        loaded = {"w": sharded(emptied(local), mesh)}
        load(path, loaded, load_planner)
        assert contents(loaded["w"].to_local()) == contents(local)
        whole = {"w": emptied(two(2 * world, 3))}
        load(path, whole, load_planner)
        assert contents(whole["w"].b[2 * rank : 2 * rank + 2]) == contents(local.b)
    with CheckpointManager(root / "run") as run:
        run.save(1, {"w": sharded(local, mesh)})
        run.save(2, {"w": sharded(local, mesh)})  # independent of the first
        assert run.save(3, {"w": sharded(local, mesh)}).chunks_referenced > 0
        loaded = {"w": sharded(emptied(local), mesh)}
        assert run.restore(loaded) == 3
        assert contents(loaded["w"].to_local()) == contents(local)


@pytest.mark.slow
def test_shards_that_are_wrapper_tensors_are_loaded_in_any_sharding(tmp_path):
    ranks.run(__file__, "save_and_load_shards", 2, tmp_path)
    with pytest.raises(UnsupportedObjectError, match="'w' is a wrapper tensor in 2 shards"):
        export_checkpoint(str(tmp_path / "shards-0"), tmp_path / "w.pt", "torch", trusted_types=[TwoTensor])
    report = export_checkpoint(str(tmp_path / "shards-0"), tmp_path / "w.safetensors", "safetensors")
    assert set(load_file(tmp_path / "w.safetensors")) == {
        f"w.[{row},0].{part}" for row in (0, 2) for part in ("a", "b")
    }
    assert report.left_out == ("w.[0,0]", "w.[2,0]")


if __name__ == "__main__":
    ranks.main({"save_and_load_shards": save_and_load_shards})
