"""Exports are read by the programs that they are for, and every value is the same bit for bit."""

from __future__ import annotations

import functools
import json
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from tests.support import ranks
from tests.support.checkpoints import data_file
from tests.support.harms import flip_in_the_middle
from tests.support.states import assert_same_state, bits, in_order
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.format.manifest import DTYPES
from millrace.checkpoint.reading.contents import pieces, stream, whole
from millrace.checkpoint.reading.opening import ManifestContents, open_contents
from millrace.checkpoint.storage.storage import LocalStorage, LocalWriter
from millrace.checkpoint.tools import export_torch
from millrace.checkpoint.tools.export_targets import FileStream
from millrace.checkpoint.tools.export_torch import nested
from millrace.checkpoint.tools.exports import export_checkpoint
from millrace.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    DiskFullError,
    IsDirectoryError,
    ObjectExistsError,
    StorageError,
    UnsupportedObjectError,
    UsageError,
)
from millrace.origin import open_origin

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

# What a safetensors file has no name for.
FOREIGN = ("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")


def random_bits(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bits at all, NaNs with payload included."""
    count = DTYPES[dtype][0] * torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == "bool" else 256
    values = torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8)
    return values.view(getattr(torch, dtype)).reshape(shape)


def a_state() -> dict:
    dtypes = [name for name in DTYPES if hasattr(torch, name) and name not in FOREIGN]
    tied = random_bits("bfloat16", 30, 20)
    return {
        "all": {name: random_bits(name, 7, 5, seed=number) for number, name in enumerate(dtypes)},
        "model": {
            "large": random_bits("float32", 1100, 700),
            "scalar": torch.tensor(-0.0),
            "empty": torch.empty(0, 4),
            "turned": random_bits("float32", 60, 40).t(),
            "tied a": tied,
            "tied b": tied,
            "ключ": random_bits("int64", 3),
        },
        "optim": {"groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}], "state": [torch.ones(2), 5]},
        "step": 17,
        "name": "run",
        "nothing": None,
    }


def flat(state: object, path: str = "") -> dict[str, object]:
    """Tensors by their flat keys."""
    if isinstance(state, torch.Tensor):
        return {path: state}
    members = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: tensor for key, value in members for name, tensor in flat(value, f"{path}.{key}".lstrip(".")).items()}


@pytest.fixture(scope="module", params=["ours", "stock"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    directory, state = tmp_path_factory.mktemp(request.param) / "c", a_state()
    kind = CheckpointWriter if request.param == "ours" else FileSystemWriter
    dcp.save(state, storage_writer=kind(directory, sync_files=False))
    return str(directory), state


def test_export_to_torch_is_equal(saved: tuple[str, dict], tmp_path: Path) -> None:
    url, state = saved
    seen: list = []
    report = export_checkpoint(url, tmp_path / "new" / "state.pt", "torch", progress=seen.append)
    assert_same_state(torch.load(tmp_path / "new" / "state.pt", weights_only=True), state)
    assert report.tensors == len(flat(state))
    assert (report.left_out, seen[-1].done_bytes) == ((), report.raw_bytes)
    assert os.listdir(tmp_path / "new") == ["state.pt"]


def test_export_to_safetensors_is_equal(saved: tuple[str, dict], tmp_path: Path) -> None:
    url, state = saved
    target = tmp_path / "model.safetensors"
    report = export_checkpoint(url, target, "safetensors")
    tensors = flat(state)
    loaded = load_file(target)
    assert loaded.keys() == tensors.keys()
    for key, value in tensors.items():
        assert_same_state(loaded[key], value, key)
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert set(report.left_out) == {
        *(f"optim.groups.{number}.{name}" for number in (0, 1) for name in ("lr", "params")),
        "optim.state.1",
        "step",
        "name",
        "nothing",
    }
    # Every tensor is at a multiple of its element's size.
    header = json.loads(target.read_bytes()[8 : 8 + int.from_bytes(target.read_bytes()[:8], "little")])
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % tensors[name].element_size() == 0


def test_export_to_safetensors_below_a_prefix_is_equal(saved: tuple[str, dict], tmp_path: Path) -> None:
    url, state = saved
    target = tmp_path / "model.safetensors"
    report = export_checkpoint(url, target, "safetensors", keys=["model", "step"], strip_prefix="model.")
    assert_same_state(in_order(load_file(target)), in_order(flat(state["model"])))
    assert report.left_out == ("step",)
    with pytest.raises(UsageError, match="is below 'encoder"):
        export_checkpoint(url, tmp_path / "x", "safetensors", strip_prefix="encoder.")
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_export_to_stock_dcp_is_equal(saved: tuple[str, dict], tmp_path: Path) -> None:
    url, state = saved
    report = export_checkpoint(url, tmp_path / "dcp", "dcp")
    assert report.objects == len(report.left_out) + 8
    loaded = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}, "step": 0}
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / "dcp"))
    assert_same_state(loaded, {"model": state["model"], "step": 17})
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "x.pt")
    again = torch.load(tmp_path / "x.pt", weights_only=True)
    export_checkpoint(tmp_path / "dcp", tmp_path / "y.pt", "torch")
    assert_same_state(torch.load(tmp_path / "y.pt", weights_only=True), state)
    assert_same_state(in_order(again), in_order(state))


def test_export_over_stock_dcp_with_overwrite_replaces_it(saved: tuple[str, dict], tmp_path: Path) -> None:
    target = tmp_path / "dcp"
    dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(target, sync_files=False))
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ObjectExistsError, match="is not empty"):
        export_checkpoint(saved[0], target, "dcp", keys=["step"])
    export_checkpoint(saved[0], target, "dcp", keys=["step"], overwrite=True)
    state = {"step": 0}
    dcp.load(state, storage_reader=FileSystemReader(target))
    assert state == {"step": 17}
    names = sorted(os.listdir(target))
    assert (len(names), names[0], names[-1]) == (3, ".metadata", "notes.txt")


@pytest.mark.parametrize("dtype", FOREIGN)
def test_export_of_dtype_unknown_to_safetensors_raises(tmp_path: Path, dtype: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    state = {"odd": random_bits(dtype, 6), "even": torch.ones(2)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    with pytest.raises(UnsupportedObjectError, match=f"'odd' \\({dtype}\\)"):
        export_checkpoint(tmp_path / "c", tmp_path / "x", "safetensors")
    assert not (tmp_path / "x").exists()
    export_checkpoint(tmp_path / "c", tmp_path / "x", "safetensors", keys=["even"])
    export_checkpoint(tmp_path / "c", tmp_path / "x.pt", "torch")
    assert_same_state(torch.load(tmp_path / "x.pt", weights_only=True), state)


def test_exported_model_in_transformers_returns_the_same_values(tmp_path: Path) -> None:
    """Tied weights included; the model returns the same values as before."""
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to load, and no other test needs it

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    state = {"model": model.state_dict(), "step": 3}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    out = tmp_path / "out"
    export_checkpoint(tmp_path / "c", out / "model.safetensors", "safetensors", strip_prefix="model.")
    config.save_pretrained(out)
    again = GPT2LMHeadModel.from_pretrained(out).eval()
    for key, value in model.state_dict().items():
        assert_same_state(again.state_dict()[key], value, key)
    tokens = torch.arange(12)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def save_shards(root: Path) -> None:
    """Two ranks: one tensor in rows, and one in columns, of seven and six."""
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    state = {
        "rows": distribute_tensor(values, mesh, [Shard(0)]),
        "columns": distribute_tensor(values, mesh, [Shard(1)]),
    }
    dcp.save(state, storage_writer=CheckpointWriter(root / "ours", sync_files=False))
    dcp.save(state, storage_writer=FileSystemWriter(root / "stock", sync_files=False))


@pytest.mark.slow
def test_export_of_shards_joins_them(tmp_path: Path) -> None:
    ranks.run(__file__, "shards", 2, tmp_path)
    expected = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    for kind in ("ours", "stock"):
        export_checkpoint(tmp_path / kind, tmp_path / f"{kind}.safetensors", "safetensors")
        for value in load_file(tmp_path / f"{kind}.safetensors").values():
            assert_same_state(value, expected)
        export_checkpoint(tmp_path / kind, tmp_path / f"{kind}-dcp", "dcp")
        state = {"rows": torch.zeros(7, 6), "columns": torch.zeros(7, 6)}
        dcp.load(state, storage_reader=FileSystemReader(tmp_path / f"{kind}-dcp"))
        assert_same_state(state, {"rows": expected, "columns": expected})


def test_export_of_delta_has_all_values(tmp_path: Path) -> None:
    first = {"w": torch.randn(600_000), "frozen": torch.randn(200_000)}
    writer = CheckpointWriter(tmp_path / "step-000000000001", sync_files=False, keep_base=True)
    dcp.save(first, storage_writer=writer)
    second = {"w": first["w"] * 1.001, "frozen": first["frozen"]}
    base = writer.written_base("step-000000000001")
    dcp.save(second, storage_writer=CheckpointWriter(tmp_path / "step-000000000002", sync_files=False, base=base))
    export_checkpoint(tmp_path / "step-000000000002", tmp_path / "x", "safetensors")
    loaded = load_file(tmp_path / "x")
    assert_same_state({key: loaded[key] for key in second}, second)


# --- reading by parts -----------------------------------------------------------------------------------


def test_pieces_of_any_size_join_to_the_whole_value(tmp_path: Path) -> None:
    state = {"w": random_bits("float32", 17, 11, 5), "v": random_bits("bfloat16", 3000), "s": torch.tensor(2.0)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    contents = open_contents(str(tmp_path / "c"))
    for key, value in state.items():
        for limit in (40, 900, 5000, 1 << 20):
            parts = list(pieces(contents, whole(contents.tensors[key]), limit))
            data = b"".join(each.tobytes() for _, each in stream(contents, parts, wave_bytes=2 * limit))
            assert data == bits(value)
            assert len(parts) > 1 or limit >= value.nbytes or value.numel() == 1


def test_export_of_many_tensors_keeps_few_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export to DCP keeps the tensors of one file: torch's writer needs them together."""
    state = {f"t{number}": torch.full((50_000,), float(number)) for number in range(12)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    alive: list[weakref.ref] = []
    most = []
    inner = ManifestContents.read

    def read(self, parts):
        values = inner(self, parts)
        alive.extend(weakref.ref(value) for value in values)
        most.append(sum(ref() is not None for ref in alive))
        return values

    monkeypatch.setattr(ManifestContents, "read", read)
    monkeypatch.setattr(export_torch, "_FILE_BYTES", 200_000)
    monkeypatch.setattr(export_torch, "stream", functools.partial(stream, wave_bytes=200_000))
    export_checkpoint(tmp_path / "c", tmp_path / "dcp", "dcp")
    assert (len(alive), len(most)) == (12, 12)
    assert max(most) <= 4
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 12


def test_export_with_damaged_byte_fails_and_leaves_no_file(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(500_000)}, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    flip_in_the_middle(data_file(tmp_path / "c"))
    (tmp_path / "out").mkdir()
    for to in ("torch", "safetensors", "dcp"):
        with pytest.raises(CorruptCheckpointError):
            export_checkpoint(tmp_path / "c", tmp_path / "out" / to, to)
    assert os.listdir(tmp_path / "out") == []
    (tmp_path / "out" / "dcp").mkdir()
    with pytest.raises(CorruptCheckpointError):
        export_checkpoint(tmp_path / "c", tmp_path / "out" / "dcp", "dcp")
    assert (tmp_path / "out" / "dcp").is_dir()


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_interrupted_export_leaves_no_file(
    saved: tuple[str, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    inner = LocalWriter.write

    def interrupted(self, data, /):
        inner(self, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(saved[0], tmp_path / "out", to, keys=["model.large", "all"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), StorageError("the directory was not synced")])
def test_export_to_dcp_stopped_after_it_is_complete_keeps_its_files(
    saved: tuple[str, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    target = tmp_path / "dcp"
    dcp.save({"step": 1}, storage_writer=FileSystemWriter(target, sync_files=False))
    inner = LocalStorage.publish

    def stopped(self, name, data, *, replace):
        inner(self, name, data, replace=replace)
        raise raised

    monkeypatch.setattr(LocalStorage, "publish", stopped)
    with pytest.raises(type(raised)):
        export_checkpoint(saved[0], target, "dcp", keys=["step"], overwrite=True)
    state = {"step": 0}
    dcp.load(state, storage_reader=FileSystemReader(target))
    assert state == {"step": 17}


@pytest.mark.parametrize("raised", [KeyboardInterrupt("terminated", 143), DiskFullError("no room")])
def test_export_to_torch_stopped_inside_the_zip_file_raises_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    dcp.save({str(n): torch.randn(1000) for n in range(9)}, storage_writer=CheckpointWriter(tmp_path / "c"))
    inner = FileStream.write
    written = []

    def interrupted(self, data):
        written.append(inner(self, data))
        if sum(written) > 5000:
            raise raised
        return written[-1]

    monkeypatch.setattr(FileStream, "write", interrupted)
    with pytest.raises(type(raised)) as caught:
        export_checkpoint(tmp_path / "c", tmp_path / "out", "torch")
    assert caught.value is raised


@pytest.mark.parametrize("left", ["step-000000000010", "step-000000000010-r1/x", "writer-000000000001.json"])
def test_export_to_dcp_into_a_run_is_refused(saved: tuple[str, dict], tmp_path: Path, left: str) -> None:
    run = tmp_path / "run"
    (run / left).mkdir(parents=True) if "." not in left else (run.mkdir(), (run / left).touch())
    before = sorted(run.rglob("*"))
    with pytest.raises(ObjectExistsError, match="is a run of Millrace: choose another directory"):
        export_checkpoint(saved[0], run, "dcp", overwrite=True)
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("to", ["torch", "safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_export_to_a_pipe_or_a_link_is_refused(
    saved: tuple[str, dict], tmp_path: Path, to: str, overwrite: bool
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("missing")
    for name, kind in (("pipe", "a device or a pipe"), ("link", "a symbolic link"), ("dangling", "a symbolic link")):
        with pytest.raises(UsageError, match=f"is {kind}, not a file: choose another name"):
            export_checkpoint(saved[0], tmp_path / name, to, overwrite=overwrite, keys=["model.large"])
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("to", ["torch", "safetensors"])
@pytest.mark.parametrize("pattern", ["manifest.*", "data-*"])
def test_export_over_a_file_of_a_checkpoint_is_refused(
    saved: tuple[str, dict], tmp_path: Path, to: str, pattern: str
) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=CheckpointWriter(tmp_path / "c"))
    (file,) = (tmp_path / "c").glob(pattern)
    before = file.read_bytes()
    for target in (file, f"file://{file}", f"s3://bucket/c/{file.name}"):
        with pytest.raises(ConfigurationError, match="has the name of a checkpoint's own file: choose another name"):
            export_checkpoint(saved[0], target, to, overwrite=True, keys=["model.large"])
    assert file.read_bytes() == before


def test_export_to_invalid_target_raises(saved: tuple[str, dict], tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"mine")
    with pytest.raises(ObjectExistsError, match="exists already"):
        export_checkpoint(saved[0], tmp_path / "there", "torch")
    with pytest.raises(ObjectExistsError, match="exists already"):
        export_checkpoint(saved[0], tmp_path / "there", "safetensors")
    assert (tmp_path / "there").read_bytes() == b"mine"
    with pytest.raises(IsDirectoryError):
        export_checkpoint(saved[0], tmp_path, "torch", overwrite=True)
    for name, error in (("", UsageError), ("x/", ConfigurationError), ("s3://bucket", ConfigurationError)):
        with pytest.raises(error):
            export_checkpoint(saved[0], name, "safetensors", overwrite=True)
    with pytest.raises(UsageError, match="choose one of torch, safetensors, dcp"):
        export_checkpoint(saved[0], tmp_path / "x", "onnx")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="only an export to safetensors can strip a prefix"):
        export_checkpoint(saved[0], tmp_path / "x", "torch", strip_prefix="model.")
    dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointWriter(tmp_path / "ours", sync_files=False))
    with pytest.raises(ObjectExistsError, match="a checkpoint of Millrace"):
        export_checkpoint(saved[0], tmp_path / "ours", "dcp", overwrite=True)
    export_checkpoint(saved[0], tmp_path / "there", "torch", keys=["step"], overwrite=True)
    assert torch.load(tmp_path / "there", weights_only=True) == {"step": 17}


def test_exported_optimizer_state_has_numbers_as_keys(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.Adam(model.parameters())]
    model(torch.ones(3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    other = {"state": {"0": 1}, "param_groups": [{"params": ["a"]}]}
    state = {"one": optimizers[0].state_dict(), "deep": [{"two": optimizers[1].state_dict()}], "other": other}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    export_checkpoint(tmp_path / "c", tmp_path / "out.pt", "torch")
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(exported["one"]["state"]) == list(exported["deep"][0]["two"]["state"]) == [0, 1]
    assert exported["other"] == other
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(exported["one"])
    assert_same_state(fresh.state_dict(), optimizers[0].state_dict())


def test_export_of_key_with_lone_surrogate_is_equal_or_names_the_key(tmp_path: Path) -> None:
    state = {"\ud800k": torch.randn(3)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    export_checkpoint(tmp_path / "c", tmp_path / "out.pt", "torch")
    assert_same_state(torch.load(tmp_path / "out.pt", weights_only=True), state)
    export_checkpoint(tmp_path / "c", tmp_path / "dcp", "dcp")
    loaded = {"\ud800k": torch.zeros(3)}
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / "dcp"))
    assert_same_state(loaded, state)
    with pytest.raises(UnsupportedObjectError, match=r"cannot hold the key '\\ud800k', which is not valid Unicode: "):
        export_checkpoint(tmp_path / "c", tmp_path / "x", "safetensors")


def test_object_refused_by_the_safe_loader_is_named(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "odd": Odd()}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False, trusted_types=[Odd]))
    with pytest.raises(UnsupportedObjectError, match="'odd'"):
        export_checkpoint(tmp_path / "c", tmp_path / "x.pt", "torch")
    export_checkpoint(tmp_path / "c", tmp_path / "x.pt", "torch", keys=["w"])
    export_checkpoint(tmp_path / "c", tmp_path / "y.pt", "torch", trusted_types=[Odd])
    assert torch.load(tmp_path / "y.pt", weights_only=False)["odd"].value == 3


class Odd:
    def __init__(self) -> None:
        self.value = 3


def test_export_to_and_from_object_store_is_equal(s3, bucket: str, tmp_path: Path) -> None:
    url, state = f"s3://{bucket}/run/step-000000000001", {"w": random_bits("float32", 3_000_000), "step": 3}
    options = s3.target_options
    dcp.save(state, storage_writer=CheckpointWriter(url, target_options=options))
    both = {"target_options": options, "output_options": options}
    export_checkpoint(url, f"s3://{bucket}/out/m.safetensors", "safetensors", **both)
    export_checkpoint(url, f"s3://{bucket}/m.pt", "torch", **both)
    export_checkpoint(url, f"s3://{bucket}/dcp", "dcp", **both)
    origin = open_origin("s3", options)
    for name in ("out/m.safetensors", "m.pt"):
        size = origin.head(f"{bucket}/{name}").size
        (tmp_path / "file").write_bytes(bytes(memoryview(origin.read(f"{bucket}/{name}", 0, size))))
        loaded = load_file(tmp_path / "file") if "safe" in name else torch.load(tmp_path / "file", weights_only=True)
        assert_same_state(loaded["w"], state["w"])
    back = {"w": torch.zeros(3_000_000), "step": 0}
    dcp.load(back, storage_reader=CheckpointReader(f"s3://{bucket}/dcp", target_options=options))
    assert_same_state(back, state)
    for name, to in (("out/m.safetensors", "safetensors"), ("m.pt", "torch"), ("dcp", "dcp")):
        with pytest.raises(ObjectExistsError):
            export_checkpoint(url, f"s3://{bucket}/{name}", to, **both)
    export_checkpoint(url, f"s3://{bucket}/dcp", "dcp", overwrite=True, **both)
    keys = [info.key for page in origin.list_pages(f"{bucket}/dcp") for info in page.objects]
    assert len(keys) == 2


# --- nesting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "paths", "state"),
    [
        ({"a.b": 1, "c": 2}, {"a.b": ("a", "b"), "c": ("c",)}, {"a": {"b": 1}, "c": 2}),
        ({"l.1": 1}, {"l.0": ("l", 0), "l.1": ("l", 1)}, {"l": [None, 1]}),
        ({"l.0.x": 1, "l.0.y": 2}, {"l.0.x": ("l", 0, "x"), "l.0.y": ("l", 0, "y")}, {"l": [{"x": 1, "y": 2}]}),
        ({"a.b": 1}, None, {"a.b": 1}),
        ({"a.b": 1}, {"a.b": "no path"}, {"a.b": 1}),
        ({"b": 1, "a": 2}, {"a": ("a",), "b": ("b",)}, {"a": 2, "b": 1}),
    ],
)
def test_export_keeps_the_nesting(values: dict, paths: object, state: dict) -> None:
    assert_same_state(nested(values, paths), state)


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x",)},
        {"a": ("x",), "b": ("x", "y")},
        {"a": ("x", 0), "b": ("x", "y")},
        {"a": ("x", -1), "b": ("b",)},
        {"a": ("x", 1 << 40), "b": ("b",)},
    ],
)
def test_export_with_contradictory_paths_raises(paths: dict) -> None:
    with pytest.raises(CorruptCheckpointError, match="no place for"):
        nested({"a": 1, "b": 2}, paths)


if __name__ == "__main__":
    ranks.main({"shards": save_shards})
