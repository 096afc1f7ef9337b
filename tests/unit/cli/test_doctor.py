"""`millrace doctor` on usable and unusable machines, directories and storages."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import main
from millrace.cli.doctor import file_system_of


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["doctor", "--json", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    assert result["ok"] is (code == 0)
    return code, {check["name"]: check for check in result["checks"]}


def test_doctor_on_usable_machine_reports_no_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_MIN_FREE", "0")
    code, checks = doctor(capsys, "--cache-dir", str(tmp_path / "not" / "there"))
    assert code == 0
    assert {check["state"] for check in checks.values()} <= {"ok", "note"}
    assert "does not exist yet" in checks["cache directory"]["detail"]
    assert checks["index"]["state"] == "ok"
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", "--cache-dir", str(tmp_path)]) == 0
    assert "LMDB opens" in capsys.readouterr().out


def test_doctor_with_unusable_directory_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, checks = doctor(capsys, "--cache-dir", str(tmp_path / "file"))
    assert code == 1
    assert checks["cache directory"]["state"] == "failed"
    assert "choose another 'cache_dir'" in checks["cache directory"]["detail"]


def test_doctor_with_min_free_above_the_free_space_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_MIN_FREE", "100%")
    code, checks = doctor(capsys, "--cache-dir", str(tmp_path))
    assert (code, checks["room"]["state"]) == (1, "failed")
    assert "min_free" in checks["room"]["detail"]


def test_doctor_on_network_file_system_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert file_system_of(Path("/proc")) == "proc"
    text = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:9 / {tmp_path!s} rw - nfs4 host:/x rw\n"
        f"3 1 0:8 / {tmp_path!s}/a\\040b rw - tmpfs tmpfs rw\n"
    )
    read_text = Path.read_text
    # The metadata of the installed packages is read, too.
    monkeypatch.setattr(
        Path, "read_text", lambda self, **kwargs: text if self.name == "mountinfo" else read_text(self, **kwargs)
    )
    assert file_system_of(tmp_path / "a b" / "c") == "tmpfs"
    assert file_system_of(tmp_path / "a") == "nfs4"
    assert file_system_of(Path(f"{tmp_path}x")) == "ext4"
    code, checks = doctor(capsys, "--cache-dir", str(tmp_path))
    assert code == 1
    assert "not a local disk" in checks["file system"]["detail"]


def test_doctor_with_missing_library_fails_only_if_it_is_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from importlib import metadata

    real = metadata.version

    def version(name: str) -> str:
        if name in ("ray", "pyarrow"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    code, checks = doctor(capsys, "--cache-dir", str(tmp_path))
    assert (code, checks["pyarrow"]["state"], checks["ray"]["state"]) == (1, "failed", "note")
    assert "millrace[ray]" in checks["ray"]["detail"]


def test_doctor_with_url_reports_whether_its_origin_is_reachable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("x")
    _, checks = doctor(capsys, f"file://{tmp_path}/data", "--cache-dir", str(tmp_path))
    assert checks["origin"]["state"] == "ok"
    assert "directly below: 1" in checks["origin"]["detail"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        code, checks = doctor(capsys, "s3://b/p", "--endpoint-url", address, "--cache-dir", str(tmp_path))
    assert (code, checks["origin"]["state"]) == (1, "failed")
    assert address in checks["origin"]["detail"]
    assert "geheim" not in str(checks)


def test_doctor_of_a_relative_path_checks_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_MIN_FREE", "0")
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"x")
    _, checks = doctor(capsys, "--cache-dir", str(tmp_path), "./file")
    assert checks["origin"]["state"] == "ok"


def test_doctor_with_endpoint_but_no_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--endpoint-url", "http://x"]) == 1
    assert "needs a URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "words"), [("FORMAT", "else 7\n", "has the format"), ("mine", "", "holds 'mine'")]
)
def test_doctor_with_directory_of_another_program_fails_and_keeps_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, words: str
) -> None:
    folder = tmp_path / "millrace" / "local"
    folder.mkdir(parents=True)
    (folder / name).write_text(text)
    code, checks = doctor(capsys, "--cache-dir", str(tmp_path))
    assert (code, checks["cache directory"]["state"]) == (1, "failed")
    assert words in checks["cache directory"]["detail"]
    assert [path.name for path in folder.iterdir()] == [name]
