import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import millrace
from millrace.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[1].strip().endswith(millrace.__version__)
    code, out, _ = run(capsys, "demo", "--help")
    assert code == 0
    assert "--no-chaos" in out
    assert "Exit codes" in run(capsys, "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nope"], 2, "No such command"),
        (["demo", "--epochs", "0"], 2, "--epochs"),
        (["demo", "--port", "99999"], 2, "--port"),
        (["demo", "--colour", "red"], 2, "--colour"),
        (["demo", "--directory", "/dev/null/x"], 1, "choose another --directory"),
        (["status", "--cache-dir", "/nonexistent-cache"], 1, "no cache in /nonexistent-cache"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    actual, out, err = run(capsys, *arguments)
    assert actual == code
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("millrace: ")
    assert words in err


def test_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"12345")
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    fs.cat_file(f"{tmp_path}/x.bin")
    code, out, _ = run(capsys, "status", "--cache-dir", str(tmp_path / "cache"), "--json")
    assert code == 0
    status = json.loads(out)
    assert (status["objects"], status["complete_objects"]) == (1, 1)
    assert status["disks"][0]["used_bytes"] == 5
    assert status["counters"]["origin_bytes"] == 5
    code, out, _ = run(capsys, "status", "--cache-dir", str(tmp_path / "cache"))
    assert "1 objects, 1 of them complete" in out


def test_an_interrupt_is_exit_code_130() -> None:
    code = (
        "import sys, time, click; from millrace import cli\n"
        "@click.command()\n"
        "def wait():\n print('ready', flush=True); time.sleep(30)\n"
        "cli.millrace.add_command(wait); sys.exit(cli.main(['wait']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "interrupted" in err
