"""The progress that long commands report, from which the remaining time is estimated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.checkpoints import data_file
from tests.support.harms import flip

from millrace.checkpoint import CheckpointWriter, diff_checkpoints, export_checkpoint
from millrace.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning")

TENSORS, ELEMENTS = 100, 64
TOTAL = TENSORS * ELEMENTS * 4


def saved(path) -> str:
    torch.manual_seed(len(str(path)))
    state = {f"w{number}": torch.randn(ELEMENTS) for number in range(TENSORS)}
    dcp.save(state, storage_writer=CheckpointWriter(path), no_dist=True)
    return str(path)


def is_in_order(reports: list) -> bool:
    done = [report.done_bytes for report in reports]
    return done == sorted(done) and all(report.total_bytes == TOTAL for report in reports)


def test_diff_progress_counts_the_read_bytes(tmp_path):
    reports: list = []
    report = diff_checkpoints(saved(tmp_path / "a"), saved(tmp_path / "bb"), progress=reports.append)
    assert report.compared_bytes == TOTAL
    assert is_in_order(reports)
    # The small tensors of both are read in one wave each.
    assert [each.done_bytes for each in reports] == [TOTAL // 2, TOTAL]


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_export_progress_counts_read_and_written_bytes(tmp_path, to):
    reports: list = []
    export_checkpoint(saved(tmp_path / "a"), tmp_path / "out", to, progress=reports.append)
    assert is_in_order(reports)
    halves = [each.done_bytes for each in reports if each.done_bytes >= TOTAL // 2]
    # All is read in one wave; the other half comes with the writing.
    assert halves[0] <= TOTAL // 2 + TOTAL // 4
    assert halves[-1] == TOTAL


def test_verify_with_one_damaged_value_counts_one(tmp_path, capsys):
    state = {"only": torch.randn(1000)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c"), no_dist=True)
    data = data_file(tmp_path / "c")
    flip(data, data.stat().st_size - 1)
    assert main(["checkpoints", "verify", str(tmp_path / "c")]) == 3
    assert "1 problem, 1 tensor or object cannot be read" in capsys.readouterr().out
