"""Weights without a template: from checkpoints of every kind, from Hugging Face directories, and back to them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tests.support import wrappers
from tests.support.failures import failure_of
from tests.support.states import assert_same_state, in_order
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter, HuggingFaceStorageWriter

from millrace.checkpoint import (
    CheckpointManager,
    CheckpointReader,
    CheckpointWriter,
    describe,
    export_checkpoint,
    load_weights,
)
from millrace.checkpoint.format.manifest import DTYPES, MANIFEST_NAME, encode_manifest, is_convertible
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.storage import open_storage
from millrace.cli import main
from millrace.errors import (
    ChangedError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    ObjectExistsError,
    UnsupportedObjectError,
    UsageError,
)
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

needs_float4 = pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4_e2m1fn_x2")

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 96), torch.nn.Embedding(50, 64), torch.nn.BatchNorm1d(7)]
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize("kind", ["ours", "stock", "s3"])
def test_weights_of_a_checkpoint_are_loaded_without_a_template(
    kind: str, model: torch.nn.Module, tmp_path: Path, s3: S3Server, bucket: str
) -> None:
    state = {"model": model.state_dict(), "step": 3, "optimizer": {"lr": 0.1}}
    url, options = (f"s3://{bucket}/c", s3.target_options) if kind == "s3" else (str(tmp_path / "c"), None)
    writer = FileSystemWriter(url) if kind == "stock" else CheckpointWriter(url, target_options=options)
    dcp.save(state, storage_writer=writer)
    expected = {f"model.{key}": value for key, value in model.state_dict().items()}
    done = []
    weights = load_weights(url, target_options=options, progress=lambda each: done.append(each.done_bytes))
    assert_same_state(weights, expected)
    assert done == sorted(done)
    assert done[-1] == sum(value.nbytes for value in expected.values())
    halved = load_weights(url, "model.0.*", dtype=torch.bfloat16, target_options=options)
    assert_same_state(halved, {key: expected[key].to(torch.bfloat16) for key in ("model.0.weight", "model.0.bias")})
    counters = load_weights(url, ["model.2"], dtype=torch.float16, target_options=options)
    assert counters["model.2.num_batches_tracked"].dtype == torch.int64
    assert counters["model.2.weight"].dtype == torch.float16


def test_weights_fill_a_module_on_the_meta_device(model: torch.nn.Module, tmp_path: Path) -> None:
    dcp.save(model.state_dict(), storage_writer=CheckpointWriter(tmp_path / "c"))
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Embedding(50, 64), torch.nn.BatchNorm1d(7))
    empty.load_state_dict(load_weights(tmp_path / "c"), assign=True)
    assert_same_state(dict(empty.state_dict()), dict(model.state_dict()))


@needs_float4
def test_packed_tensor_keeps_its_type_where_others_are_converted(tmp_path: Path) -> None:
    packed = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    dcp.save({"packed": packed, "w": torch.ones(3)}, storage_writer=CheckpointWriter(tmp_path / "c"))
    weights = load_weights(tmp_path / "c", dtype=torch.bfloat16)
    assert (weights["packed"].dtype, weights["w"].dtype) == (torch.float4_e2m1fn_x2, torch.bfloat16)
    assert torch.equal(weights["packed"].view(torch.uint8), packed.view(torch.uint8))
    with pytest.raises(ConfigurationError, match="not packed"):
        load_weights(tmp_path / "c", dtype=torch.float4_e2m1fn_x2)
    with pytest.raises(UnsupportedObjectError, match=r"'packed' \(float4_e2m1fn_x2\): leave them out"):
        export_checkpoint(tmp_path / "c", tmp_path / "x", "safetensors", dtype="bfloat16")
    export_checkpoint(tmp_path / "c", tmp_path / "x", "safetensors", dtype="bfloat16", keys=["w"])
    assert_same_state(load_file(tmp_path / "x"), {"w": torch.ones(3, dtype=torch.bfloat16)})


@pytest.mark.parametrize("stored", [name for name in DTYPES if hasattr(torch, name)])
def test_tensor_of_every_type_is_loaded_with_dtype(stored: str, tmp_path: Path) -> None:
    value = torch.arange(64, dtype=torch.uint8).view(getattr(torch, stored))
    dcp.save({"w": value}, storage_writer=CheckpointWriter(tmp_path / "c"))
    for dtype in (torch.float32, torch.float8_e5m2):
        expected = value.to(dtype) if is_convertible(stored) else value
        found = load_weights(tmp_path / "c", dtype=dtype)["w"]
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_wrapper_tensor_is_loaded_as_one_value(tmp_path: Path) -> None:
    value = wrappers.scaled(6, 4)
    dcp.save({"w": value, "plain": torch.ones(2)}, storage_writer=CheckpointWriter(tmp_path / "c"))
    weights = load_weights(tmp_path / "c", trusted_types=[wrappers.Scaled, wrappers.Settings])
    assert weights.keys() == {"w", "plain"}
    assert type(weights["w"]) is wrappers.Scaled
    assert wrappers.contents(weights["w"]) == wrappers.contents(value)
    assert load_weights(tmp_path / "c", "plain").keys() == {"plain"}


def test_load_without_weights_raises(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "step": 3}, storage_writer=CheckpointWriter(tmp_path / "c"))
    with pytest.raises(UsageError, match=r"no tensor of .* was selected"):
        load_weights(tmp_path / "c", "step")
    with pytest.raises(UsageError, match="no key of the checkpoint matches 'x'"):
        load_weights(tmp_path / "c", "x")
    with pytest.raises(ConfigurationError, match="floating-point dtype"):
        load_weights(tmp_path / "c", dtype=torch.int8)
    with pytest.raises(ConfigurationError, match="has no values"):
        load_weights(tmp_path / "c", device="meta")
    with pytest.raises(ConfigurationError, match="give a device of torch"):
        load_weights(tmp_path / "c", device="pizza")
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
        load_weights(tmp_path / "missing")
    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, {"x": torch.ones(1)})
    with pytest.raises(CheckpointNotFoundError, match="this is a run: give one of its checkpoints, such as step-"):
        load_weights(tmp_path / "run")


@pytest.mark.parametrize("shape", [(0, 3), (2,)])
def test_tensor_without_shards_is_loaded_if_it_has_no_elements(shape: tuple[int, ...], tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointWriter(tmp_path / "c"))
    manifest = read_manifest(open_storage(tmp_path / "c")).manifest
    (entry,) = manifest.tensors
    none = entry._replace(key="a", shape=shape, shards=())
    (tmp_path / "c" / MANIFEST_NAME).write_bytes(encode_manifest(replace(manifest, tensors=(none, entry))))
    assert torch.equal(load_weights(tmp_path / "c", "w")["w"], torch.ones(2))
    if 0 in shape:
        assert load_weights(tmp_path / "c")["a"].shape == shape
        return
    with pytest.raises(CorruptCheckpointError, match="a part of 'a' has no values"):
        load_weights(tmp_path / "c")


# --- Hugging Face directories ---------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model in two files with an index, written by the library, and its tensors. One tensor has several parts."""
    torch.manual_seed(2)
    tensors = {
        "large": torch.randn(700, 900),
        "small": torch.randn(3, 5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
    }
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"large": tensors["large"]}, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    rest = {key: value for key, value in tensors.items() if key != "large"}
    save_file({**rest, "unused": torch.ones(2)}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    names = {key: f"model-0000{1 if key == 'large' else 2}-of-00002.safetensors" for key in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder, tensors


def test_hugging_face_directory_is_read_as_weights_and_by_dcp(split: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = split
    assert_same_state(in_order(load_weights(folder)), in_order(tensors))
    state = {key: torch.zeros_like(value) for key, value in tensors.items()}
    dcp.load(state, storage_reader=CheckpointReader(folder))
    assert_same_state(state, tensors)
    assert_same_state(load_weights(folder, dtype=torch.float64, keys="large"), {"large": tensors["large"].double()})


def test_hugging_face_directory_in_a_bucket_reads_only_what_is_selected(
    split: tuple[Path, dict[str, torch.Tensor]], s3: S3Server, bucket: str
) -> None:
    from millrace.filesystem import filesystem
    from millrace.testing.region import EmulatedRegion

    folder, tensors = split
    fs = filesystem("s3", s3.target_options, members="none")
    for file in folder.iterdir():
        fs.origin.put(f"{bucket}/m/{file.name}", file.read_bytes())
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0, bytes_per_second=None) as region:
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        assert_same_state(
            load_weights(f"s3://{bucket}/m", "small", target_options=options), {"small": tensors["small"]}
        )
        assert region.stats().by_kind["GET"].bytes_down < 200_000  # the headers, and not `large`


def test_one_tensor_of_torchs_own_checkpoint_in_a_bucket_takes_few_requests(
    s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    from millrace.filesystem import filesystem
    from millrace.testing.region import EmulatedRegion

    dcp.save(
        {f"w{number}": torch.full((9,), number) for number in range(50)}, storage_writer=FileSystemWriter(tmp_path)
    )
    fs = filesystem("s3", s3.target_options, members="none")
    for file in tmp_path.iterdir():
        fs.origin.put(f"{bucket}/c/{file.name}", file.read_bytes())
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0, bytes_per_second=None) as region:
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        assert load_weights(f"s3://{bucket}/c", "w7", target_options=options)["w7"].tolist() == [7] * 9
        assert region.stats().requests < 20


def test_single_file_and_files_without_index_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(4)}, tmp_path / "y.safetensors")
    assert load_weights(tmp_path).keys() == {"a", "b"}
    save_file({"b": torch.ones(4)}, tmp_path / "z.safetensors")
    with pytest.raises(CorruptCheckpointError, match="both contain 'b'"):
        load_weights(tmp_path)
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert load_weights(tmp_path).keys() == {"c"}


def test_index_that_a_model_in_one_file_has_left_behind_is_ignored(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to load

    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path, max_shard_size="5KB")
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    assert (tmp_path / INDEX).exists()
    weights = load_weights(tmp_path)
    assert torch.equal(weights["transformer.wte.weight"], model.transformer.wte.weight)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "in the index but missing"),
        (lambda folder: (folder / "model-00001-of-00002.safetensors").write_bytes(b"abc"), "not a safetensors file"),
        (lambda folder: (folder / INDEX).write_text("{"), "not an index"),
        (
            lambda folder: save_file({"other": torch.ones(1)}, folder / "model-00001-of-00002.safetensors"),
            "'large' is in the index but not in its file",
        ),
        (
            lambda folder: [(folder / name).unlink() for name in (INDEX, "model-00001-of-00002.safetensors")],
            "there are 1 of the 00002 files of 'model', and no index",
        ),
    ],
    ids=["missing", "short", "index", "other", "part"],
)
def test_damaged_hugging_face_directory_raises_corrupt(
    split: tuple[Path, dict[str, torch.Tensor]], harm: object, message: str
) -> None:
    harm(split[0])  # type: ignore[operator]
    with pytest.raises(CorruptCheckpointError, match=message):
        load_weights(split[0])


@pytest.mark.parametrize("way", ["in place", "by a rename"])
def test_hugging_face_file_that_is_replaced_during_a_load_raises_changed(
    split: tuple[Path, dict[str, torch.Tensor]], way: str
) -> None:
    folder, tensors = split
    file = folder / "model-00001-of-00002.safetensors"

    class Replaces(DefaultLoadPlanner):  # type: ignore[misc]
        def create_local_plan(self) -> object:
            new = file if way == "in place" else folder / "new"
            save_file({"large": tensors["large"] + 1}, new, {"format": "pt"})
            os.replace(new, file)
            return super().create_local_plan()

    state = {"large": torch.zeros_like(tensors["large"])}
    error = failure_of(dcp.load, state, storage_reader=CheckpointReader(folder), planner=Replaces())
    assert isinstance(error, ChangedError)
    assert "model-00001-of-00002.safetensors was replaced during the read" in str(error)
    assert torch.equal(load_weights(folder)["large"], tensors["large"] + 1)


@pytest.mark.parametrize("options", [{}, {"save_distributed": True, "enable_consolidation": True}], ids=["", "joined"])
def test_whole_tensors_of_torchs_hugging_face_writer_are_read(options: dict[str, bool], tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path), **options), no_dist=True)
    assert_same_state(load_weights(tmp_path), state)


def test_parts_of_ranks_from_torchs_hugging_face_writer_are_refused(tmp_path: Path) -> None:
    """A part has the shape of what its rank had, so without the other files it looks like a whole tensor."""
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save({"a": torch.arange(6.0)}, storage_writer=writer, no_dist=True)
    with pytest.raises(UnsupportedObjectError, match="parts of tensors"):
        load_weights(tmp_path)


def test_unknown_element_type_raises_only_if_selected(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "q": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
            "a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"qqab")
    with pytest.raises(UnsupportedObjectError, match=r"'q' of .* has the element type 'F4'"):
        load_weights(tmp_path)
    assert load_weights(tmp_path, "a")["a"].tolist() == [97, 98]


# --- exports to Hugging Face directories ----------------------------------------------------------


def test_sharded_export_is_read_by_from_pretrained(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to load

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trained = GPT2LMHeadModel(config).eval()
    state = {"module": {"net": trained.state_dict()}, "step": 3}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    out = tmp_path / "out"
    out.mkdir()
    config.save_pretrained(out)  # other files may be in the directory
    report = export_checkpoint(
        tmp_path / "c", out, "safetensors", shard_bytes=5000, rename=[r"module\.net\.(.*)=\1"], keys=["module"]
    )
    assert report.tensors == len(trained.state_dict())
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    again = GPT2LMHeadModel.from_pretrained(out).eval()
    assert_same_state(dict(again.state_dict()), dict(trained.state_dict()))
    assert_same_state(load_weights(out), dict(trained.state_dict()))


def test_export_converts_and_replaces_a_model_only_when_asked(
    split: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, tensors = split
    out = tmp_path / "out"
    export_checkpoint(folder, out, "safetensors", shard_bytes=1000)
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(ObjectExistsError, match="contains a model"):
        export_checkpoint(folder, out, "safetensors", shard_bytes=1 << 30)
    export_checkpoint(folder, out, "safetensors", shard_bytes=1 << 30, dtype="float16", overwrite=True)
    assert sorted(file.name for file in out.iterdir()) == ["model.safetensors", "tokenizer.json"]
    converted = {key: value.half() if value.is_floating_point() else value for key, value in tensors.items()}
    assert_same_state(in_order(load_file(out / "model.safetensors")), in_order(converted))
    with pytest.raises(UsageError, match="would be read and overwritten"):
        export_checkpoint(folder, folder, "safetensors", shard_bytes=1000, overwrite=True)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="would be read and overwritten"):
        export_checkpoint(folder, tmp_path / "link", "safetensors", shard_bytes=1000, overwrite=True)
    assert_same_state(in_order(load_weights(folder)), in_order(tensors))


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_export_of_a_model_over_itself_by_another_spelling_is_refused(
    split: tuple[Path, dict[str, torch.Tensor]], s3: S3Server, bucket: str, scheme: str
) -> None:
    folder, tensors = split
    url, options = f"s3://{bucket}/m", s3.target_options
    export_checkpoint(folder, url, "safetensors", shard_bytes=1000, output_options=options)
    with pytest.raises(UsageError, match="would be read and overwritten"):
        export_checkpoint(
            url,
            f"{scheme}://{bucket}/m/",
            "safetensors",
            shard_bytes=1000,
            overwrite=True,
            target_options=options,
            output_options=options,
        )
    assert_same_state(in_order(load_weights(url, target_options=options)), in_order(tensors))


def test_failed_export_of_several_files_leaves_none(
    split: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, _ = split
    file = folder / "model-00001-of-00002.safetensors"
    calls = []

    def cut_source(progress: object) -> None:
        calls.append(progress)
        if len(calls) == 1:
            file.write_bytes(file.read_bytes()[:100_000])

    with pytest.raises(Exception, match="model-00001-of-00002"):
        export_checkpoint(folder, tmp_path / "out", "safetensors", shard_bytes=100, progress=cut_source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (["a"], "is not a rename"),
        (["(=x"], "cannot be used"),
        ([r"(.*)=\2"], "cannot be used"),
        (["nothing=x"], "matches no key"),
        ([".*=x"], "would both be 'x'"),
        (["large="], "empty name"),
    ],
)
def test_export_with_an_unusable_rename_raises_and_writes_nothing(
    split: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, rename: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export_checkpoint(split[0], tmp_path / "x.safetensors", "safetensors", rename=rename)
    assert not (tmp_path / "x.safetensors").exists()


def test_export_command_writes_shards(
    split: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tensors = split
    out = tmp_path / "out"
    arguments = ["checkpoints", "export", str(folder), str(out), "--to", "safetensors", "--shard-size", "1MB"]
    assert main([*arguments, "--rename", r"(.*)=net.\1", "--dtype", "bfloat16"]) == 0
    assert "4 tensors" in capsys.readouterr().out
    assert load_weights(out).keys() == {f"net.{key}" for key in tensors}
    assert main([*arguments[:-1], "80%", "--overwrite"]) == 1
    assert main(["checkpoints", "export", str(folder), str(tmp_path / "t"), "--to", "torch", "--dtype", "float16"]) == 1
    assert "only an export to safetensors" in capsys.readouterr().err
    assert main(["checkpoints", "show", str(folder)]) == 0
    assert "large" in capsys.readouterr().out
    assert describe(folder).tensors == 4
