"""A stand-in for Google Cloud Storage: `GcsFront`, the dialect of its XML interface in front of a real S3 server.

Google's interface for objects is that of S3 with other headers and bearer tokens. The front checks the token, translates the
conditions of a write, signs the request for the S3 server behind it (SeaweedFS), and passes answers on. It also gives out
tokens as Google's token service does, for service accounts.

Its limits, against the real service: no generations (ETags only), no JSON interface, no Google account other than a service
account (whose signature it does not check), no rate limits, and names of buckets and errors are those of S3.
"""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from millrace.testing.s3 import S3Server
from millrace.testing.sigv4 import signed_headers

_HOST = "127.0.0.1"
_PASSED_ON = ("content-type", "if-match", "if-none-match", "range")
_PASSED_BACK = ("accept-ranges", "content-range", "content-type", "etag", "last-modified")


class GcsFront:
    """Answers on 127.0.0.1 and a free port from one thread a connection. A context manager; the S3 server must run.

    `token_seconds` is how long the tokens live that its token service gives out. Thread-safe.
    """

    def __init__(self, server: S3Server, *, token_seconds: float = 3600) -> None:
        self.server = server
        self.token_seconds = token_seconds
        self.tokens_given = 0
        self._ends: dict[str, float] = {}
        handler = type("_Handler", (_Handler,), {"front": self})
        self._http = ThreadingHTTPServer((_HOST, 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, name="gcs-front", daemon=True)

    @property
    def endpoint(self) -> str:
        """The URL of the buckets."""
        return f"http://{_HOST}:{self._http.server_port}"

    def token(self, *, seconds: float = 3600) -> str:
        """A bearer token that is taken for so long."""
        token = "ya29." + secrets.token_hex(16)
        self._ends[token] = time.monotonic() + seconds
        return token

    def service_account(self, private_key: str) -> dict[str, str]:
        """The content of a service account's JSON file, with a private key in PEM and this front as its token service."""
        return {
            "type": "service_account",
            "project_id": "millrace",
            "client_email": "tests@millrace.iam.example",
            "private_key_id": "1",
            "private_key": private_key,
            "token_uri": f"{self.endpoint}/token",
        }

    def end_all_tokens(self) -> None:
        """From now on all that were given out are refused."""
        self._ends.clear()

    def takes(self, authorization: str) -> bool:
        """Whether the header names a token that has not ended."""
        return self._ends.get(authorization.removeprefix("Bearer "), 0.0) > time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front: ClassVar[GcsFront]

    def setup(self) -> None:
        super().setup()
        self._behind = http.client.HTTPConnection(_HOST, self.front.server.port, timeout=300)

    def finish(self) -> None:
        self._behind.close()
        super().finish()

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        if self.path == "/token":
            self._body()
            self.front.tokens_given += 1
            token = self.front.token(seconds=self.front.token_seconds)
            answer = {"access_token": token, "expires_in": int(self.front.token_seconds), "token_type": "Bearer"}
            self._answer(200, {"content-type": "application/json"}, json.dumps(answer).encode())
        else:
            self._serve()

    def _serve(self) -> None:
        body = self._body()
        if not self.front.takes(self.headers.get("authorization", "")):
            self._answer(401, {}, b"<Error><Code>AuthenticationRequired</Code></Error>")
            return
        parts = urlsplit(self.path)
        path = quote(unquote(parts.path), safe="/-_.~")
        pairs = sorted(parse_qsl(parts.query, keep_blank_values=True))
        query = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)
        headers = {name: value for name, value in self.headers.items() if name.lower() in _PASSED_ON}
        if self.headers.get("x-goog-if-generation-match") == "0":
            headers["If-None-Match"] = "*"
        server = self.front.server
        headers |= signed_headers(
            str(self.command),
            f"{_HOST}:{server.port}",
            path,
            key=server.key,
            secret=server.secret,
            query=query,
            body_hash="UNSIGNED-PAYLOAD",
        )
        self._behind.request(str(self.command), f"{path}?{query}" if query else path, body=body, headers=headers)
        answer = self._behind.getresponse()
        data = answer.read()
        kept = {name: value for name, value in answer.getheaders() if name.lower() in _PASSED_BACK}
        size = answer.headers.get("content-length") if self.command == "HEAD" else None
        self._answer(answer.status, kept, data, size=size)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, size: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", size or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # tests log their requests themselves
