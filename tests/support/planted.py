"""Planted secrets, and a search in everything that is shown or stored."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import secrets
import threading
import traceback
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from millrace.events import Event, add_hook


class Planted:
    """Secrets by name, and the observed texts: `saw` adds a text, `leaks` returns the secrets found in any of them."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}
        self._seen: list[tuple[str, bytes]] = []

    def secret(self, name: str, *, prefix: str = "", base64_key: bool = False) -> str:
        """A new secret. `base64_key` returns an encoded key, as Azure requires."""
        raw = secrets.token_hex(24)
        value = base64.b64encode(f"key-{raw}".encode()).decode() if base64_key else f"{prefix}{raw}"
        self.secrets[name] = value
        return value

    def known(self, name: str, value: str) -> str:
        """Something secret that was made elsewhere."""
        self.secrets[name] = value
        return value

    def saw(self, where: str, text: str | bytes) -> None:
        """Something that others may read."""
        self._seen.append((where, text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")))

    def saw_object(self, where: str, thing: object) -> None:
        """The texts of an object."""
        for text in (repr(thing), str(thing), f"{thing}"):
            self.saw(where, text)

    def saw_error(self, where: str, error: BaseException) -> None:
        """An error as a program prints it that does not catch it: with its causes."""
        self.saw_object(where, error)
        self.saw(where, repr(error.args))
        self.saw(where, "".join(traceback.format_exception(error)))

    def saw_files(self, where: str, below: Path, *, but: Iterable[str] = ()) -> int:
        """Every name and byte below a folder, except files named in `but`; returns how many files there were."""
        count = 0
        # Not Path.rglob, which raises when a process deletes a folder meanwhile.
        for folder, _, names in os.walk(below):
            for path in (Path(folder, name) for name in names if name not in but):
                if path.is_file():
                    self.saw(f"{where}: {path.relative_to(below)}", str(path).encode("utf-8", "surrogateescape"))
                    with contextlib.suppress(FileNotFoundError):
                        self.saw(f"{where}: {path.relative_to(below)}", path.read_bytes())
                        count += 1
        return count

    def places(self) -> set[str]:
        """Where texts were seen."""
        return {where for where, _ in self._seen}

    def leaks(self) -> list[str]:
        """Which secret was seen where, in any of its forms."""
        found = set()
        for name, secret in self.secrets.items():
            for form in forms(secret):
                found |= {f"{name} in {where}" for where, text in self._seen if form in text}
        return sorted(found)

    def is_in(self, data: bytes, *names: str) -> bool:
        """Whether all the named secrets are in some bytes, in any form: the test that such a search finds anything."""
        return all(any(form in data for form in forms(self.secrets[name])) for name in names)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records all logs at DEBUG, of every library, and all events."""
        root = logging.getLogger()
        noting = _Noting(self)
        before = root.level
        loggers = list(logging.root.manager.loggerDict.values())
        # Only those with a level: each change visits all loggers, and libraries create thousands.
        levels = {logger: logger.level for logger in loggers if isinstance(logger, logging.Logger) and logger.level}
        root.addHandler(noting)
        root.setLevel(logging.DEBUG)
        for logger in levels:
            logger.setLevel(logging.NOTSET)
        remove = add_hook(self._saw_event)
        try:
            yield
        finally:
            remove()
            root.removeHandler(noting)
            root.setLevel(before)
            for logger, level in levels.items():
                logger.setLevel(level)

    def _saw_event(self, event: Event) -> None:
        self.saw(f"event {event.name}", repr(event))


class _Noting(logging.Handler):
    def __init__(self, planted: Planted) -> None:
        super().__init__(logging.DEBUG)
        self._planted = planted

    def emit(self, record: logging.LogRecord) -> None:
        self._planted.saw(f"log of {record.name}", logging.Formatter().format(record))
        self._planted.saw(f"log of {record.name}", repr(record.args))


def forms(secret: str) -> set[bytes]:
    """How a secret may look in a URL, in a header, in JSON or in a pickle."""
    plain = secret.encode()
    found = {plain, quote(secret, safe="").encode(), quote(secret).encode(), plain.hex().encode()}
    for shift in range(3):  # as a part of something that was encoded
        padded = base64.b64encode(b"\0" * shift + plain)
        found.add(padded[4 if shift else 0 : -4])
        found.add(base64.urlsafe_b64encode(b"\0" * shift + plain)[4 if shift else 0 : -4])
    return found


class RefusingServer:
    """An HTTP server that returns one status and records its requests. A context manager."""

    def __init__(self, status: int, body: bytes = b"<Error><Code>Refused</Code></Error>") -> None:
        self.requests: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body_sent = self.rfile.read(int(self.headers.get("content-length") or 0))
                outer.requests.append(f"{self.requestline}\r\n{self.headers}".encode("latin-1") + body_sent)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - the library's names

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> RefusingServer:
        self._thread.start()
        return self

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self.is_open:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()
