"""`diff_checkpoints`: the changes and their size; chunks with equal checksums are not read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.support.checkpoints import data_file
from torch.distributed.checkpoint import FileSystemWriter

from millrace.checkpoint import CheckpointWriter
from millrace.checkpoint.format.manifest import DTYPES
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.checkpoint.tools.diffing import diff_checkpoints
from millrace.errors import CorruptCheckpointError, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def save(state: dict, directory: Path, kind: type = CheckpointWriter) -> str:
    dcp.save(state, storage_writer=kind(directory, sync_files=False))
    return str(directory)


def large() -> torch.Tensor:
    return torch.randn(1_500_000, generator=torch.Generator().manual_seed(3))


def test_diff_of_equal_checkpoints_reads_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": large(), **{f"b{number}": torch.full((9,), number) for number in range(20)}, "step": 3}
    a, b = save(state, tmp_path / "a"), save(state, tmp_path / "b")
    read = []
    inner = LocalStorage.read
    monkeypatch.setattr(
        LocalStorage,
        "read",
        lambda self, file, start, stop: read.append(stop - start) or inner(self, file, start, stop),
    )
    report = diff_checkpoints(a, b)
    assert (report.same, report.equal, report.compared_bytes) == (True, 22, 0)
    assert report.skipped_bytes == state["w"].nbytes + 20 * 72
    assert sum(read) < 20_000  # manifests and the object


def test_diff_of_hugging_face_directories_compares_the_values(tmp_path: Path) -> None:
    before = {"w": large(), "same": torch.ones(5)}
    after = {**before, "w": before["w"].clone()}
    after["w"][1_000_000] += 2.0
    for name, state in (("a", before), ("b", after)):
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    report = diff_checkpoints(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [(change.key, change.changed) for change in report.tensors] == [("w", 1)]
    assert (report.same, report.equal) == (False, 1)
    assert diff_checkpoints(str(tmp_path / "a"), save(before, tmp_path / "c")).same


@pytest.mark.parametrize("kinds", [(CheckpointWriter, CheckpointWriter), (CheckpointWriter, FileSystemWriter)])
def test_diff_reports_the_change_of_a_tensor(tmp_path: Path, kinds: tuple[type, type]) -> None:
    before = {"w": large(), "same": torch.ones(5), "bf16": torch.tensor([1.0, -2.0, 0.0, 4.0]).bfloat16()}
    after = {key: value.clone() for key, value in before.items()}
    after["w"][1_000_000] += 2.0
    after["w"][3] -= 0.5
    after["bf16"][2] = -0.0
    after["bf16"][3] = 1.0
    report = diff_checkpoints(save(before, tmp_path / "a", kinds[0]), save(after, tmp_path / "b", kinds[1]))
    w, bf16 = report.tensors
    changes = (after["w"].double() - before["w"].double()).abs()
    assert (w.key, w.elements, w.changed, w.not_finite) == ("w", 1_500_000, 2, 0)
    assert w.max_abs == float(changes.max())
    assert w.mean_abs == pytest.approx(float(changes.mean()), rel=1e-12)
    assert w.relative_l2 == pytest.approx(float(changes.norm() / before["w"].double().norm()), rel=1e-12)
    # Both zeros are equal as values, and different in their bits.
    assert (bf16.changed, bf16.max_abs, bf16.mean_abs) == (2, 3.0, 0.75)
    assert bf16.relative_l2 == pytest.approx(3 / math.sqrt(21))
    assert (report.equal, report.same) == (1, False)
    if kinds[1] is CheckpointWriter:
        # Two of six chunks differ, of which each piece has several.
        assert 0 < report.skipped_bytes < before["w"].nbytes


def test_diff_of_nan_and_infinity_is_reported(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    before = {"f": torch.tensor([1.0, nan, inf, 2.0, nan]), "zero": torch.zeros(3), "flag": torch.tensor([True, False])}
    after = {"f": torch.tensor([nan, nan, inf, 2.5, 1.0]), "zero": torch.ones(3), "flag": torch.tensor([True, True])}
    report = diff_checkpoints(save(before, tmp_path / "a"), save(after, tmp_path / "b"))
    f, zero, flag = report.tensors
    assert (f.changed, f.not_finite, f.max_abs, f.mean_abs) == (3, 2, 0.5, 0.1)
    assert f.relative_l2 == pytest.approx(0.5 / math.sqrt(5))
    assert (zero.changed, zero.max_abs, zero.relative_l2) == (3, 1.0, None)
    assert (flag.changed, flag.max_abs, flag.mean_abs, flag.relative_l2) == (1, None, None, None)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if hasattr(torch, name)])
def test_diff_of_states_that_differ_in_one_element_counts_it_for_every_dtype(tmp_path: Path, dtype: str) -> None:
    width = DTYPES[dtype][0]
    one = torch.zeros(width * 6, dtype=torch.uint8)
    other = one.clone()
    other[2 * width + width - 1] = 1
    states = [{"t": data.view(getattr(torch, dtype))} for data in (one, other)]
    report = diff_checkpoints(save(states[0], tmp_path / "a"), save(states[1], tmp_path / "b"))
    (change,) = report.tensors
    assert (change.changed, change.elements) == (1, states[0]["t"].numel())
    if dtype not in ("bool", "float4_e2m1fn_x2"):
        wide = torch.complex128 if "complex" in dtype else torch.float64
        assert change.max_abs == float((states[1]["t"].to(wide) - states[0]["t"].to(wide)).abs().max())


def test_diff_reports_added_removed_and_changed_kinds(tmp_path: Path) -> None:
    before = {
        "gone": torch.ones(2),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(4),
        "turned": torch.ones(2),
        "same": {"a": 1},
        "lr": 0.1,
        "long": list(range(1000)),
    }
    after = {
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(4).half(),
        "turned": "text",
        "same": {"a": 1},
        "lr": 0.2,
        "long": list(range(999)),
        "new": "x",
    }
    report = diff_checkpoints(save(before, tmp_path / "a"), save(after, tmp_path / "b"))
    assert sorted(report.added) == ["new", "turned"]
    assert sorted(report.removed) == ["gone", "turned"]
    shape, dtype = report.tensors
    assert (shape.key, shape.shape, shape.changed) == ("shape", ((2, 3), (3, 2)), None)
    assert (dtype.key, dtype.dtype, dtype.changed) == ("dtype", ("float32", "float16"), None)
    objects = {change.key: change for change in report.objects}
    assert set(objects) == {"lr", "long"}
    assert (objects["lr"].before, objects["lr"].after) == ("0.1", "0.2")
    assert len(objects["long"].before) == 200
    assert report.equal == 1
    back = diff_checkpoints(str(tmp_path / "b"), str(tmp_path / "a"))
    assert (set(back.added), set(back.removed)) == (set(report.removed), set(report.added))


def test_diff_of_selected_keys_ignores_others(tmp_path: Path) -> None:
    a = save({"model": {"w": torch.ones(3)}, "optim": {"m": torch.ones(3)}}, tmp_path / "a")
    b = save({"model": {"w": torch.ones(3)}, "optim": {"m": torch.zeros(3)}}, tmp_path / "b")
    assert diff_checkpoints(a, b, keys=["model"]).same
    assert not diff_checkpoints(a, b, keys=["*.m"]).same
    with pytest.raises(UsageError, match="'nope'"):
        diff_checkpoints(a, b, keys=["nope"])


def test_diff_of_delta_with_its_base_reads_only_changed_chunks(tmp_path: Path) -> None:
    first = {"frozen": large(), "w": large() * 2}
    writer = CheckpointWriter(tmp_path / "step-000000000001", sync_files=False, keep_base=True)
    dcp.save(first, storage_writer=writer)
    base = writer.written_base("step-000000000001")
    second = {"frozen": first["frozen"], "w": first["w"] * 1.001}
    dcp.save(second, storage_writer=CheckpointWriter(tmp_path / "step-000000000002", sync_files=False, base=base))
    report = diff_checkpoints(str(tmp_path / "step-000000000001"), str(tmp_path / "step-000000000002"))
    (change,) = report.tensors
    assert change.key == "w"
    assert change.relative_l2 == pytest.approx(1e-3, rel=1e-3)
    assert (report.compared_bytes, report.skipped_bytes) == (first["w"].nbytes, first["frozen"].nbytes)


def test_diff_of_damaged_checkpoint_raises(tmp_path: Path) -> None:
    a, b = save({"w": large()}, tmp_path / "a"), save({"w": large() + 1}, tmp_path / "b")
    data = data_file(tmp_path / "b")
    data.write_bytes(data.read_bytes()[:-5] + b"12345")
    with pytest.raises(CorruptCheckpointError):
        diff_checkpoints(a, b)
