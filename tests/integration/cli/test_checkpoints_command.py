"""`millrace checkpoints` as users run it, on local runs and on a real S3 server: results, exit codes, errors, interrupts."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.support.checkpoints import data_file
from tests.support.harms import flip_in_the_middle
from tests.support.runs import name_of
from tests.support.terminal import Terminal
from torch.distributed.checkpoint import FileSystemWriter

from millrace.checkpoint import CheckpointManager, CheckpointWriter
from millrace.checkpoint.tools import verifying
from millrace.cli import main
from millrace.figures import size_text
from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LOSSES = {10: 2.0, 20: 1.0, 30: 3.0}


def save_run(run: str, **options) -> dict:
    """Three saves, each a delta to the one before; the state of the last."""
    base, before = None, ""
    generator = torch.Generator().manual_seed(1)
    state = {
        "model": {f"layers.{number}.weight": torch.randn(40_000, generator=generator) for number in range(12)},
        "frozen": torch.randn(300_000, generator=generator),
        "step": 0,
    }
    for step, loss in LOSSES.items():
        state["model"] = {key: value * 1.001 for key, value in state["model"].items()}
        state["step"] = step
        record = {
            "step": step,
            "kind": "delta" if base else "full",
            "bases": [before] if base else [],
            "full": name_of(10),
            "metrics": {"loss": loss},
        }
        writer = CheckpointWriter(
            f"{run}/{name_of(step)}",
            sync_files=False,
            base=base,
            keep_base=True,
            user_metadata={"run": record, "user": {"note": "mine"}},
            **options,
        )
        dcp.save(state, storage_writer=writer)
        base, before = writer.written_base(name_of(step)), name_of(step)
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    directory = tmp_path_factory.mktemp("saved") / "run"
    return directory, save_run(str(directory))


def test_watched_list_of_a_running_job_shows_the_next_save(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(1000)}
    with CheckpointManager(tmp_path / "run") as run:
        run.save(1, state)
        command = [sys.executable, "-m", "millrace.cli", "checkpoints", "ls", "--watch", "--interval", "0.1"]
        with Terminal([*command, str(tmp_path / "run")]) as terminal:
            terminal.until("1 complete checkpoint:")
            run.save(2, state)
            terminal.until("2 complete checkpoints:")
    assert terminal.status == 0


@pytest.fixture
def run(saved: tuple[Path, dict], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "run"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["checkpoints", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def damage(directory: Path) -> None:
    flip_in_the_middle(data_file(directory))


@pytest.mark.parametrize("text", ["\ud800", "\x1b[2J"])
def test_command_with_unprintable_keys_prints_them_escaped(call, tmp_path: Path, text: str) -> None:
    run, escaped = tmp_path / "run", text.encode("unicode_escape").decode()
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, {f"{text}k": torch.full((3,), step), f"{text}{step}": step}, metrics={f"{text}m": 0.5})
    for command, code, expected in (
        (["ls", run], 0, ["m"]),
        (["show", run], 0, ["k", "2"]),
        (["diff", run / name_of(1), run / name_of(2)], 3, ["k", "1", "2"]),
        (["export", run, tmp_path / "out.pt", "--to", "torch"], 0, []),
        (["export", run, tmp_path / "x", "--to", "safetensors", "--strip-prefix", "x"], 1, []),
    ):
        found, out, err = call(*command)
        assert found == code, err
        assert all(escaped + each in out for each in expected)
        assert text not in out + err
    damage(run / name_of(2))
    code, out, err = call("verify", run)
    assert code == 3, err
    assert escaped in out
    assert text not in out + err


# --- ls -------------------------------------------------------------------------------------------------


def test_ls_of_a_run_lists_every_checkpoint(call, run: Path) -> None:
    code, out, err = call("ls", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["step", "time", "size", "raw", "ratio", "restore", "base", "loss", "state"]
    assert [line.split()[0] for line in lines[1:4]] == ["10", "20", "30"]
    assert "  full  " in lines[1]
    assert "  delta on 10  " in lines[2]
    assert [line.split()[-2:] for line in lines[1:4]] == [[f"{loss:g}", "complete"] for loss in LOSSES.values()]
    assert lines[4].startswith("3 complete checkpoints: ")
    assert max(map(len, lines)) <= 100


def test_command_with_run_without_checkpoints_succeeds(call, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with CheckpointManager(tmp_path / "saved") as manager:
        manager.save(1, {"step": 1})
    shutil.rmtree(tmp_path / "saved" / name_of(1))
    for run in ("new", "saved"):
        assert call("ls", tmp_path / run) == (0, "no checkpoints\n", "")
        assert call("ls", tmp_path / run, "--json") == (0, "[]\n", "")
        code, out, err = call("prune", tmp_path / run, "--keep", "last=1,every=100", "--yes")
        assert (code, out.splitlines()[-1], err) == (0, "0 checkpoints stay: there is nothing to remove", "")
    # A directory of runs, and one with other files: probably a wrong path.
    (tmp_path / "new" / "notes").write_text("x")
    for place in (tmp_path, tmp_path / "new", tmp_path / "new" / "notes"):
        assert call("ls", place)[0] == 1


def test_ls_of_damaged_run_marks_incomplete_and_unreadable_checkpoints(call, run: Path) -> None:
    shutil.copytree(run / name_of(20), run / f"{name_of(20)}-r1")
    (run / name_of(40)).mkdir()
    (run / name_of(40) / "data-00-0-0.millrace").write_bytes(b"x" * 1000)
    (run / f"{name_of(20)}" / "manifest.millrace").write_bytes(b"damaged")
    shutil.copytree(run / name_of(10), run / name_of(50))
    (run / name_of(10) / "manifest.millrace").unlink()
    code, out, _ = call("ls", run)
    states = {line.split()[0]: line for line in out.splitlines()[1:-1]}
    assert code == 0
    assert states["10"].endswith("removed, but 30, 20-r1 needs it") or states["10"].endswith("30 needs it")
    assert "unreadable: " in states["20"]
    assert states["20-r1"].endswith("complete")
    assert states["30"].endswith("given up")
    assert states["40"].endswith("incomplete")
    assert states["50"].endswith("given up")
    rows = {row["name"]: row for row in json.loads(call("ls", run, "--json")[1])}
    complete = [row for row in rows.values() if row["complete"] and not row["error"]]
    stored, raw = (sum(row[name] for row in complete) for name in ("stored_bytes", "raw_bytes"))
    rest = sum(row["stored_bytes"] for row in rows.values()) - stored
    # The sizes and the ratio are of the same checkpoints.
    assert out.splitlines()[-1] == (
        f"3 complete checkpoints: {size_text(stored)} for {size_text(raw)} of values ({stored / raw:.2f}); "
        f"3 others: {size_text(rest)}"
    )
    assert rows[name_of(40)]["complete"] is False
    assert rows[name_of(40)]["stored_bytes"] == 1000
    assert rows[name_of(20)]["error"]
    assert rows[name_of(30)]["abandoned"] is True
    assert name_of(30) in rows[name_of(10)]["needed_by"]


@pytest.mark.parametrize("command", ["ls", "show"])
def test_json_output_of_nan_and_infinity_is_null(call, tmp_path: Path, command: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": torch.zeros(3)}, {"loss": float("nan"), "best": float("inf"), "rate": 0.5})
    code, out, _ = call(command, tmp_path, "--json")

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    content = json.loads(out, parse_constant=refuse)
    metrics = content[0]["metrics"] if command == "ls" else content["run"]["metrics"]
    assert code == 0
    assert metrics == {"loss": None, "best": None, "rate": 0.5}


def test_ls_with_json_returns_the_facts_of_every_checkpoint(call, run: Path) -> None:
    code, out, _ = call("ls", run, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["step"], row["kind"], row["bases"]) for row in rows[:2]] == [
        (10, "full", []),
        (20, "delta", [name_of(10)]),
    ]
    for row in rows:
        own = sum(path.stat().st_size for path in (run / row["name"]).iterdir())
        assert row["stored_bytes"] == own
        assert row["restore_bytes"] >= own
        assert row["ratio"] == pytest.approx(own / row["raw_bytes"])
        assert row["metrics"] == {"loss": LOSSES[row["step"]]}
        assert row["user"] == {"note": "mine"}
        assert time.strptime(row["created"], "%Y-%m-%dT%H:%M:%SZ").tm_year >= 2024


def test_ls_of_one_checkpoint_lists_only_it(call, run: Path, tmp_path: Path) -> None:
    assert "  delta on 10" in call("ls", run / name_of(20))[1]
    dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "stock"))
    assert "torch's own" in call("ls", tmp_path / "stock")[1]
    dcp.save({"w": torch.ones(3)}, storage_writer=CheckpointWriter(tmp_path / "alone"))
    (row,) = json.loads(call("ls", tmp_path / "alone", "--json")[1])
    assert (row["step"], row["name"], row["kind"]) == (None, "alone", "full")


# --- show -----------------------------------------------------------------------------------------------


def test_show_prints_metrics_metadata_and_every_value(call, run: Path) -> None:
    code, out, err = call("show", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith(name_of(30))
    assert 'metrics: {"loss": 3.0}' in lines
    assert 'metadata: {"note": "mine"}' in lines
    assert max(map(len, lines[1:])) <= 100
    keys = [line.split()[0] for line in lines if line.startswith("model.")]
    assert keys == [f"model.layers.{number}.weight" for number in range(12)]  # 2 before 10
    (frozen,) = [line for line in lines if line.startswith("frozen")]
    assert frozen.split()[1:5] == ["float32", "300000", "1", "0"]
    assert frozen.endswith("unchanged")
    assert any(line.startswith("step ") for line in lines)
    header = next(line for line in lines if line.startswith("tensors "))
    # The last lines explain the columns that are not clear from their names.
    for name in ("rank", "stored", "ratio", "stored as"):
        assert name in header
        assert f"{name}: " in "\n".join(lines[-2:])


def test_show_of_many_values_cuts_the_list_unless_all_are_requested(call, tmp_path: Path) -> None:
    state = {f"t.{number}": torch.ones(2) for number in range(60)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c", sync_files=False))
    out = call("show", tmp_path / "c")[1]
    assert "... and 20 more (--all shows them)" in out
    assert "t.39 " in out
    assert "t.40 " not in out
    assert "t.59 " in call("show", tmp_path / "c", "--all")[1]
    out = call("show", tmp_path / "c", "--keys", "t.5?", "--keys", "t.1")[1]
    assert [line.split()[0] for line in out.splitlines() if line.startswith("t.")] == [
        "t.1",
        *(f"t.5{n}" for n in range(10)),
    ]


def test_show_with_json_returns_every_value(call, run: Path, saved: tuple[Path, dict]) -> None:
    content = json.loads(call("show", run, "--step", 20, "--json")[1])
    values = {value["key"]: value for value in content["values"]}
    assert content["url"].endswith(name_of(20))
    assert content["run"]["step"] == 20
    assert content["user"] == {"note": "mine"}
    assert values["frozen"]["shape"] == [300_000]
    assert values["frozen"]["chunks_referenced"] > 0
    assert values["frozen"]["ranks"] == [0]
    assert values["step"]["dtype"] is None
    assert sum(value["raw_bytes"] for value in values.values()) == content["raw_bytes"]


# --- verify ---------------------------------------------------------------------------------------------


def test_verify_with_damaged_checkpoint_names_the_damage_and_exits_with_3(call, run: Path) -> None:
    code, out, err = call("verify", run, "--all", "-j", 2)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "3 checkpoints: all good"
    assert call("verify", run)[1].splitlines()[0].startswith(str(run / name_of(30)))
    damage(run / name_of(10))
    code, out, _ = call("verify", run, "--all")
    assert code == 3
    assert out.splitlines()[-1].endswith(" damaged")
    assert "does not match its checksum; affects " in out
    code, out, _ = call("verify", run, "--step", 10, "--json")
    (report,) = json.loads(out)
    assert (code, report["ok"], len(report["damages"])) == (3, False, 1)
    assert report["damaged_keys"] == report["damages"][0]["keys"]


def test_manifest_that_the_disk_cannot_read_is_reported_with_the_others(call, run: Path) -> None:
    manifest = run / name_of(10) / "manifest.millrace"
    manifest.unlink()
    manifest.symlink_to(manifest.name)
    code, out, _ = call("verify", run, "--all")
    assert (code, out.splitlines()[-1]) == (3, "3 checkpoints: 1 damaged")
    assert ": 1 problem, its tensors and objects cannot be read\n" in out
    code, out, _ = call("ls", run)
    assert code == 0
    assert "unreadable: " in out
    # The manifest is lost, the data still takes space.
    rows = {row["name"]: row for row in json.loads(call("ls", run, "--json")[1])}
    assert rows[name_of(10)]["stored_bytes"] >= data_file(run / name_of(10)).stat().st_size
    code, out, _ = call("prune", run, "--keep", 1, "--yes")
    assert code == 0
    assert f"{name_of(10)} cannot be read: it stays" in out


def test_verify_of_all_skips_a_checkpoint_that_is_pruned_meanwhile(call, run: Path, monkeypatch) -> None:
    def verify(url: str, *arguments, **options):
        if url.endswith(name_of(20)):
            (Path(url) / "manifest.millrace").unlink()
        return original(url, *arguments, **options)

    original = verifying.verify_checkpoint
    monkeypatch.setattr(verifying, "verify_checkpoint", verify)
    code, out, err = call("verify", run, "--all")
    assert (code, out.splitlines()[-1]) == (0, "2 checkpoints: all good")
    assert f"{run / name_of(20)}: not counted" in err
    assert call("verify", run / name_of(20))[0] == 1


def test_verify_with_missing_base_file_names_it(call, run: Path) -> None:
    path = data_file(run / name_of(10))
    path.unlink()
    code, out, _ = call("verify", run, "--step", 20)
    assert code == 3
    assert out.startswith(f"../{name_of(10)}/{path.name}: is missing; affects ")
    assert "1 problem, " in out


# --- diff -----------------------------------------------------------------------------------------------


def test_diff_of_two_steps_reports_the_changes(call, run: Path) -> None:
    code, out, err = call("diff", run, "--step", 10, "--step", 20)
    assert (code, err) == (3, "")
    assert "model.layers.11.weight  float32  40000" in out
    assert out.splitlines()[-1].startswith("1 equal, 13 changed, 0 only in A, 0 only in B; ")
    assert max(map(len, out.splitlines())) <= 150
    assert call("diff", run / name_of(10), run, "--keys", "frozen")[0] == 0
    assert call("diff", run, run, "--step", 20)[0] == 0
    content = json.loads(call("diff", run, "--step", 10, "--step", 30, "--json")[1])
    (w,) = [change for change in content["tensors"] if change["key"] == "model.layers.3.weight"]
    assert w["relative_l2"] == pytest.approx(0.002, rel=0.01)
    assert content["objects"] == [{"key": "step", "before": "10", "after": "30"}]
    assert content["same"] is False


# --- export ---------------------------------------------------------------------------------------------


def test_export_writes_each_format_and_keeps_existing_files(
    call, run: Path, saved: tuple[Path, dict], tmp_path: Path
) -> None:
    target = tmp_path / "model.safetensors"
    code, out, err = call("export", run, target, "--to", "safetensors", "--strip-prefix", "model.")
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == "left out: step, frozen"
    loaded = load_file(target)
    assert all(torch.equal(loaded[key], value) for key, value in saved[1]["model"].items())
    code, out, err = call("export", run, target, "--to", "safetensors")
    assert (code, out) == (1, "")
    assert err == f"millrace: {target} exists already: choose another name, or overwrite it\n"
    target = tmp_path / "state.pt"
    target.write_bytes(b"older")
    code, out, _ = call("export", run, target, "--to", "torch", "--overwrite", "--keys", "step", "--step", 20, "--json")
    assert (code, json.loads(out)["objects"], torch.load(target)) == (0, 1, {"step": 20})
    assert call("export", run, tmp_path / "dcp", "--to", "dcp")[0] == 0
    assert call("diff", run, tmp_path / "dcp")[0] == 0


# --- prune ----------------------------------------------------------------------------------------------


def test_prune_without_confirmation_removes_nothing_and_with_it_the_planned_steps(call, run: Path) -> None:
    before = sorted(path for path in run.rglob("*"))
    code, out, err = call("prune", run, "--keep", "last=1,best=loss:min", "--dry-run")
    assert (code, err) == (0, "")
    assert sorted(path for path in run.rglob("*")) == before
    lines = {line.split()[0]: line for line in out.splitlines()[1:4]}
    assert lines["20"].endswith("stays  best=loss:min:1")
    assert lines["30"].endswith("stays  last=1")
    code, out, err = call("prune", run, "--keep", "last=1")
    assert code == 2
    assert err.startswith("millrace: prune needs --yes, because stdin is not a terminal")
    assert sorted(path for path in run.rglob("*")) == before
    code, out, _ = call("prune", run, "--keep", "last=1", "--yes", "--json")
    content = json.loads(out)
    assert name_of(20) in content["removed"]
    assert name_of(30) in content["kept"]
    assert call("verify", run, "--all")[0] == 0
    out = call("prune", run, "--keep", "last=1", "-y")[1]
    assert out.splitlines()[-1].endswith("there is nothing to remove")


def test_prune_on_a_terminal_requires_confirmation(run: Path) -> None:
    for answer, left in (("n\n", True), ("y\n", False)):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "millrace.cli", "checkpoints", "prune", str(run), "--keep", "last=1"],
            stdin=slave,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.write(master, answer.encode())
        out, err = process.communicate(timeout=300)
        os.close(master)
        os.close(slave)
        assert process.returncode == 0
        assert "Remove " in err
        assert (run / name_of(20) / "manifest.millrace").exists() == left
        assert ("nothing was removed" in out) == left


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ls", "{tmp}/nothing"], 1, "no checkpoint found"),
        (["ls", "{above}"], 1, "no checkpoint found: give the directory of a run, such as {run}\n"),
        (["ls", ""], 1, "empty"),
        (["ls", "s3://"], 1, "names no checkpoint"),
        (["show", "{tmp}/nothing"], 1, "not a complete checkpoint, nor a run"),
        (["show", "{one}/manifest.millrace"], 1, "not a complete checkpoint, nor a run"),
        (["show", "{run}", "--step", "19"], 1, "the nearest are of step 10, 20, 30"),
        (["show", "{run}", "--step", "-1"], 2, "--step"),
        (["show", "{run}", "--keys", "modle"], 1, "no key of the checkpoint matches 'modle'"),
        (["show", "{one}", "--step", "10"], 1, "is one checkpoint, not a run"),
        (["verify", "{run}", "--all", "--step", "10"], 2, "not both"),
        (["verify", "{one}", "--all"], 1, "is one checkpoint, not a run"),
        (["verify", "{run}", "-j", "0"], 2, "'-j'"),
        (["verify", "{stock}"], 1, "without checksums to check"),
        (["export", "{run}", "{tmp}/x"], 2, "--to"),
        (["export", "{run}", "{tmp}/x", "--to", "onnx"], 2, "onnx"),
        (["export", "{run}", "{tmp}", "--to", "torch"], 1, "is a directory"),
        (["export", "{run}", "{tmp}/x", "--to", "dcp", "--strip-prefix", "a"], 1, "only an export to safetensors"),
        (["prune", "{run}"], 2, "--keep"),
        (["prune", "{run}", "--keep", "last=few"], 1, "is not a retention policy"),
        (["prune", "{one}", "--keep", "last=1"], 1, "is one checkpoint, not a run"),
        (["prune", "{tmp}/nothing", "--keep", "last=1"], 1, "no checkpoint found"),
        (["diff", "{run}"], 2, "two checkpoints, or one run and --step twice"),
        (["diff", "{run}", "--step", "1", "--step", "2", "--step", "3"], 2, "at most twice"),
        (["diff", "{run}", "{tmp}/nothing"], 1, "not a complete checkpoint, nor a run"),
    ],
)
def test_command_with_invalid_input_prints_one_line(
    call, saved: tuple[Path, dict], tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    if "{stock}" in arguments:
        dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "stock"))
    places = {
        "tmp": tmp_path,
        "above": saved[0].parent,
        "run": saved[0],
        "one": saved[0] / name_of(10),
        "stock": tmp_path / "stock",
    }
    actual, out, err = call(*(argument.format(**places) for argument in arguments))
    assert (actual, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("millrace: ")
    assert words.format(**places) in err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["ls"], ["show"], ["verify"], ["diff", "--step", "10", "--step", "30"]])
def test_command_with_closed_output_pipe_exits_with_141(saved: tuple[Path, dict], arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "millrace.cli", "checkpoints", arguments[0], str(saved[0]), *arguments[1:]]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=300)
    os.close(writer)
    assert done.returncode == 141
    # A slow command reports its progress, but not the closed pipe.
    assert not any(word in done.stderr for word in (b"Traceback", b"Error", b"millrace: "))


# --- an object store ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(s3: S3Server) -> tuple[str, dict]:
    s3.create_bucket("checkpoints-command")
    run = "s3://checkpoints-command/run"
    return run, save_run(run, target_options=s3.target_options)


@pytest.fixture
def access(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    return s3.endpoint_url


def test_command_with_run_on_object_store_works_as_with_local_run(
    call, stored: tuple[str, dict], access: str, s3: S3Server, tmp_path: Path
) -> None:
    run, state = stored
    there = ["--endpoint-url", access]
    assert len(json.loads(call("ls", run, "--json", *there)[1])) == 3
    assert f"{run}/{name_of(30)}" in call("show", run, *there)[1]
    assert call("verify", run, "--all", *there)[0] == 0
    assert call("diff", run, "--step", 10, "--step", 30, *there)[0] == 3
    target = tmp_path / "model.safetensors"
    assert call("export", run, target, "--to", "safetensors", "--keys", "frozen", *there)[0] == 0
    assert torch.equal(load_file(target)["frozen"], state["frozen"])
    assert call("export", run, "s3://checkpoints-command/out.pt", "--to", "torch", *there)[0] == 0
    assert call("export", run, "s3://checkpoints-command/dcp", "--to", "dcp", *there)[0] == 0
    assert call("diff", run, "s3://checkpoints-command/dcp", *there)[0] == 0
    assert call("prune", run, "--keep", "all", *there)[0] == 0
    origin = open_origin("s3", s3.target_options)
    copy = "checkpoints-command/copy"
    for page in origin.list_pages("checkpoints-command/run"):
        for info in page.objects:
            data = origin.read(info.key, 0, info.size)
            origin.put(info.key.replace("checkpoints-command/run", copy), data)
    assert call("prune", f"s3://{copy}", "--keep", "last=1", "--yes", *there)[0] == 0
    assert call("verify", f"s3://{copy}", "--all", *there)[0] == 0
    code, out, err = call("ls", "s3://checkpoints-command/nothing", *there)
    assert (code, out, err.count("\n")) == (1, "", 1)
    origin.put("checkpoints-command/begun/writer-000000000001.json", b"{}")  # what the first save of a run writes first
    assert call("ls", "s3://checkpoints-command/begun", *there) == (0, "no checkpoints\n", "")
    for command in (["ls"], ["verify"], ["prune", "--keep", "all"]):
        code, out, err = call(*command, "s3://no-such-bucket/run", *there)
        assert (code, out) == (1, "")
        assert err.startswith("millrace: the bucket of s3://no-such-bucket/run does not exist: ")


def test_command_with_wrong_credentials_prints_one_line(
    call, stored: tuple[str, dict], access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for command in ("ls", "show", "verify"):
        code, out, err = call(command, stored[0], "--endpoint-url", access)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "denied" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize("command", ["verify", "export"])
def test_interrupted_command_prints_its_progress_and_leaves_no_file(
    stored: tuple[str, dict], s3: S3Server, tmp_path: Path, command: str, number: signal.Signals, code: int, word: str
) -> None:
    run, _ = stored
    arguments = {
        "verify": ["verify", run, "-j", "1"],
        "export": ["export", run, str(tmp_path / "x"), "--to", "safetensors"],
    }
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": s3.key, "AWS_SECRET_ACCESS_KEY": s3.secret}
    with EmulatedRegion(s3.endpoint_url) as region:
        region.reshape(
            round_trip_seconds=0.005, bytes_per_second=1e5
        )  # it takes half a minute, unless it is interrupted
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "millrace.cli",
                "checkpoints",
                *arguments[command],
                "--endpoint-url",
                region.endpoint_url,
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 120
        while region.stats(prefix="/checkpoints-command/run/").bytes_down < 100_000:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        region.reshape(round_trip_seconds=0.005, bytes_per_second=None)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (code, "")
    *progress, last = err.splitlines()
    assert last.startswith(f"millrace: {word}: ")
    # On a slow machine there is a line of progress for each ten seconds.
    assert all(line.split("%")[0].isdecimal() for line in progress)
    assert not any(tmp_path.iterdir())
