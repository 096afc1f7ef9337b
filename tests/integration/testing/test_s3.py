"""The S3 server for tests: a real one, that keeps its data and does not outlive its owner."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import obstore.store
import pytest
from tests.support.waiting import wait_until

from millrace import errors
from millrace.testing import s3 as s3_module
from millrace.testing.s3 import S3Server, main


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        running.create_bucket("bucket")
        yield running


def client(server: S3Server, *, secret: str | None = None) -> obstore.store.S3Store:
    return obstore.store.S3Store(
        "bucket",
        endpoint=server.endpoint_url,
        access_key_id=server.key,
        secret_access_key=secret or server.secret,
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_objects_can_be_written_and_read(server: S3Server) -> None:
    store = client(server)
    store.put("a/b", b"0123456789")
    assert bytes(store.get("a/b").bytes()) == b"0123456789"
    assert bytes(store.get_range("a/b", start=2, end=5)) == b"234"


def test_conditional_put_has_one_winner(server: S3Server) -> None:
    store = client(server)
    store.put("once", b"first", mode="create", use_multipart=False)
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        store.put("once", b"second", mode="create", use_multipart=False)
    assert bytes(store.get("once").bytes()) == b"first"


def test_wrong_secret_is_refused(server: S3Server) -> None:
    with pytest.raises(obstore.exceptions.BaseError) as caught:
        client(server, secret="wrong").get("a/b")
    assert isinstance(caught.value, obstore.exceptions.PermissionDeniedError)


def test_buckets_are_created_and_removed(server: S3Server) -> None:
    server.create_bucket("bucket")
    with pytest.raises(errors.ConfigurationError, match="not a bucket name"):
        server.create_bucket("X")


def test_server_keys_are_private_and_not_in_repr(server: S3Server) -> None:
    assert stat.S_IMODE((server.directory / "keys.json").stat().st_mode) == 0o600
    assert server.secret not in repr(server)


@pytest.mark.slow
def test_server_directory_has_one_server_at_a_time(server: S3Server) -> None:
    with pytest.raises(errors.UsageError, match="another S3 server is using"):
        S3Server(server.directory).start()


def test_port_in_use_raises_in_one_line(server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dir", str(tmp_path), "--port", str(server.port)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_restarted_server_has_the_same_objects(tmp_path: Path) -> None:
    server = S3Server(tmp_path)
    with server:
        server.create_bucket("bucket")
        client(server).put("kept", b"bytes")
        pid = server.pid
    assert pid is not None
    assert not is_running(pid)
    with S3Server(tmp_path) as again:
        assert again.key != server.key
        assert bytes(client(again).get("kept").bytes()) == b"bytes"
        leftovers = list(tmp_path.glob("m[0-9]*"))
        assert len(leftovers) == 1


@pytest.mark.slow
def test_server_ends_with_its_owner_and_frees_its_directory(tmp_path: Path) -> None:
    # Started in a thread that ends: the kernel's parent-death signal would take that for the end of the owner.
    program = """
        import sys, threading, time
        from millrace.testing.s3 import S3Server
        server = S3Server(sys.argv[1])
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        time.sleep(0.5)
        server.create_bucket("bucket")
        print(server.pid, flush=True)
        time.sleep(100)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert os.getsid(pid) != os.getsid(owner.pid), "Ctrl-C in the owner's terminal would reach it"
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)
    with S3Server(tmp_path):
        pass


@pytest.mark.slow
def test_sockets_of_a_killed_server_are_removed_by_the_next_one_elsewhere(tmp_path: Path) -> None:
    def sockets(server: S3Server) -> list[Path]:
        grpc_ports = re.findall(r"-\w+\.port\.grpc=(\d+)", Path(f"/proc/{server.pid}/cmdline").read_text())
        return [path for port in grpc_ports for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock")]

    with S3Server(tmp_path / "killed") as killed, S3Server(tmp_path / "running") as running:
        of_killed, of_running = sockets(killed), sockets(running)
        assert of_killed
        assert of_running
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda: not killed.is_running)
        with S3Server(tmp_path / "next"):
            assert not [path for path in of_killed if path.exists()]
            assert all(path.exists() for path in of_running)
    assert not [path for path in of_running if path.exists()]


def test_socket_of_a_server_that_accepts_nothing_is_kept_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the full path may be too long for a socket
    monkeypatch.setattr(s3_module, "_SOCKETS", Path())
    path = "seaweedfs-s3-grpc-1.sock"
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as waiting:
        server.bind(path)
        server.listen(0)
        os.utime(path, (0, 0))
        refused = 0
        while not refused:
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            refused = client.connect_ex(path)
        probe = threading.Thread(target=s3_module._remove_dead_sockets, daemon=True)
        probe.start()
        probe.join(10)
        assert not probe.is_alive()
        assert os.path.exists(path)


def test_missing_server_binary_raises_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> list[object]:
        raise s3_module.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(s3_module.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(s3_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(s3_module.importlib.metadata, "files", absent)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.MissingDependencyError, match=r"millrace\[server\]"):
        S3Server(tmp_path / "data").start()


def test_server_that_ends_at_start_raises_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "weed"
    fake.write_text("#!/bin/sh\necho cannot do it\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(s3_module, "find_weed", lambda: fake)
    with pytest.raises(errors.OriginUnavailableError, match=r"status 3.*cannot do it"):
        S3Server(tmp_path / "data").start()


def test_server_on_full_disk_raises_before_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(s3_module.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(errors.DiskFullError, match="free at least"):
        S3Server(tmp_path).start()
    assert not (tmp_path / "keys.json").exists()
