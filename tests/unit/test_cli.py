import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

import millrace
from millrace import cli
from millrace.cache.node import close_nodes
from millrace.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[1].strip().endswith(millrace.__version__)
    code, out, _ = run(capsys, "load", "--help")
    assert code == 0
    assert "--verify" in out
    assert "Exit codes" in run(capsys, "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nope"], 2, "No such command"),
        (["load"], 2, "URL"),
        (["checkpoints", "verify", "--threads", "0", "x"], 2, "--threads"),
        (["status", "--colour", "red"], 2, "--colour"),
        (["status", "--cache-dir", "/nonexistent-cache"], 1, "/nonexistent-cache: no cache"),
        (["status", "--watch=abc"], 2, "see 'millrace status --help'"),
        (["plan", "--json=abc"], 2, "see 'millrace plan --help'"),
        (["plan", "--disk", "1TB"], 2, "Missing option '--data'"),
        (["plan", "--data", "1TB"], 2, "Missing option '--disk'"),
        (["checkpoints", "ls", "--watch=abc"], 2, "see 'millrace checkpoints ls --help'"),
        (["checkpoints", "--help=abc"], 2, "see 'millrace checkpoints --help'"),
        (["status", "-q"], 2, "'-q': it goes before the command: 'millrace -q status'"),
        (["load", "x", "-vv"], 2, "'-v': it goes before the command: 'millrace -v load'"),
        (["checkpoints", "ls", "--log-level", "info"], 2, "'millrace --log-level ... checkpoints ls'"),
        (["status", "-y"], 2, "see 'millrace status --help'"),
        (["-y", "status"], 2, "see 'millrace --help'"),
    ],
)
def test_command_with_invalid_input_prints_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    actual, out, err = run(capsys, *arguments)
    assert actual == code
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("millrace: ")
    assert words in err


def test_status_prints_the_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"12345")
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    fs.cat_file(f"{tmp_path}/x.bin")
    code, out, _ = run(capsys, "status", "--cache-dir", str(tmp_path / "cache"), "--json")
    assert code == 0
    status = json.loads(out)
    assert (status["objects"], status["complete_objects"]) == (1, 1)
    [disk] = status["disks"]
    assert disk["used_bytes"] == 5
    assert 0 < disk["room_bytes"] <= disk["capacity_bytes"] - 5
    assert status["counters"]["origin_bytes"] == 5
    code, out, _ = run(capsys, "status", "--cache-dir", str(tmp_path / "cache"))
    assert "1 object, all complete" in out


def test_status_creates_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"12345")
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    fs.cat_file(f"{tmp_path}/x.bin")
    del fs
    close_nodes()
    before = sorted(path for path in tmp_path.rglob("*") if path.is_dir())
    arguments = ["--cache-dir", str(tmp_path / "cache"), "--cache-dir", str(tmp_path / "typo")]
    code, out, _ = run(capsys, "status", "--json", *arguments)
    assert code == 0
    assert json.loads(out)["missing"] == [str(tmp_path / "typo")]
    assert len(json.loads(out)["disks"]) == 1
    assert f"{tmp_path}/typo: no cache" in run(capsys, "status", *arguments)[1]
    assert not (tmp_path / "typo").exists()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_dir()) == before


# --- the end of a command ---------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A command `fail`, which raises the errors in the list."""
    errors: list[BaseException] = []

    @click.command()
    def fail() -> None:
        raise errors[0]

    monkeypatch.setitem(cli.millrace.commands, "fail", fail)
    return errors


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a\nb"),
        OSError(28, "No space left on device"),
        EOFError("ended"),
        BrokenPipeError(32, "of another"),
    ],
)
def test_unexpected_error_is_one_line(
    capsys: pytest.CaptureFixture[str], failing: list[BaseException], error: BaseException
) -> None:
    failing.append(error)
    code, out, err = run(capsys, "fail")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"millrace: unexpected {type(error).__name__}: ")
    assert "report" in err


def test_traceback_is_shown_with_debug(
    capsys: pytest.CaptureFixture[str], failing: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_DEBUG", "1")
    failing.append(ZeroDivisionError("x"))
    code, _, err = run(capsys, "fail")
    assert code == 1
    assert "Traceback" in err


@pytest.mark.parametrize("arguments", [["--help"], ["load", "--help"], ["--version"]])
def test_closed_stdout_exits_with_141_silently(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "millrace.cli", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--json"]])
def test_full_stdout_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "millrace.cli", *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert (
        done.stderr
        == "millrace: the output could not be written: No space left on device: check the target of stdout\n"
    )


def test_stdout_that_is_closed_before_the_start_is_one_line() -> None:
    program = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'millrace.cli', '--help'])"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stderr == "millrace: the output could not be written: Bad file descriptor: check the target of stdout\n"


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "hung up")],
)
def test_command_after_a_signal_cleans_up_and_exits_with_its_code(number: signal.Signals, code: int, word: str) -> None:
    program = (
        "import sys, time, click; from millrace import cli; from millrace.cli import interrupts\n"
        "@click.command()\n"
        "def wait():\n"
        " with interrupts.remembered():\n"
        "  try: print('ready', flush=True); time.sleep(300)\n"
        "  finally: print('cleaned up', flush=True)\n"
        "cli.millrace.add_command(wait); sys.exit(cli.main(['wait']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert out == "cleaned up\n"
    assert err == f"millrace: {word}; nothing is left running\n"


def test_ctrl_c_during_imports_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("millrace.cli.app.add_commands", interrupted)
    assert main(["--help"]) == 130
    assert capsys.readouterr().err.startswith("millrace: interrupted")
