"""A web server with files in memory: with and without ranges, HEAD, lengths, ETags, dates, index pages.

with WebServer() as server:
    server.put("/data/x.bin", b"...")
    origin = open_origin("http")
    origin.read(f"{server.host}/data/x.bin", 0, 3)
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import html
import re
import ssl
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

from tests.support.http_service import HttpService, Reply, Request

Tags = Literal["strong", "weak", "none"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The newest version of a file."""

    data: bytes
    tag: str
    modified: str


def ranged(request: Request, data: bytes, headers: dict[str, str]) -> Reply:
    """The answer to a GET or HEAD of `data`: all of it, or the range that was requested, as RFC 9110 has it."""
    headers = {"Accept-Ranges": "bytes", **headers}
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if match is None or request.method != "GET":
        return Reply(headers={**headers, "Content-Length": str(len(data))}, body=data)
    start, stop = int(match[1]), min(len(data), int(match[2] or len(data)) + 1)
    if start >= len(data):
        return Reply(status=416, headers={**headers, "Content-Range": f"bytes */{len(data)}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return Reply(status=206, headers=headers, body=data[start:stop])


def precondition_fails(request: Request, tag: str, modified: str) -> bool:
    """Whether If-Match or If-Unmodified-Since requires another version than this."""
    wanted = request.headers.get("if-match")
    if wanted is not None:
        return wanted != "*" and (tag.startswith("W/") or tag not in [each.strip() for each in wanted.split(",")])
    since = request.headers.get("if-unmodified-since")
    if since is None or not modified:
        return False
    return email.utils.parsedate_to_datetime(modified) > email.utils.parsedate_to_datetime(since)


class WebServer:
    """The server, with its files. Everything may be changed while it runs; thread-safe.

    `ranges`, `head`, `lengths`, `dates`, `index` and `preconditions` are its features. `login` is the (user, password)
    that it requires. `url` and `host` are its address, and `service` has the received requests.
    """

    def __init__(
        self,
        *,
        ranges: bool = True,
        head: bool = True,
        lengths: bool = True,
        dates: bool = True,
        index: bool = True,
        preconditions: bool = True,
        tags: Tags = "strong",
        login: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.ranges, self.head, self.lengths, self.dates, self.index = ranges, head, lengths, dates, index
        self.preconditions, self.tags, self.login = preconditions, tags, login
        self._files: dict[str, StoredFile] = {}
        self._redirects: dict[str, tuple[int, str]] = {}
        self._versions = 0
        self._lock = threading.Lock()
        self.service = HttpService(self._answer, tls=tls)
        self.url, self.host = self.service.url, self.service.host

    @property
    def requests(self) -> list[Request]:
        return self.service.requests

    def put(self, path: str, data: bytes, *, modified: float | None = None) -> None:
        """Create or overwrite the file at `path`, which is decoded and begins with a slash."""
        with self._lock:
            self._versions += 1
            tag = f'"{self._versions}-{hashlib.sha1(data).hexdigest()[:12]}"'
            date = email.utils.formatdate(time.time() if modified is None else modified, usegmt=True)
            self._files[path] = StoredFile(data, tag, date)

    def delete(self, path: str) -> None:
        """Remove a file; ignores a missing one."""
        with self._lock:
            self._files.pop(path, None)

    def redirect(self, path: str, location: str, status: int = 302) -> None:
        """Redirect requests for `path` to `location`."""
        self._redirects[path] = (status, location)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.close()

    def _answer(self, request: Request) -> Reply:
        if self.login is not None:
            wanted = "Basic " + base64.b64encode(":".join(self.login).encode()).decode()
            if request.headers.get("authorization") != wanted:
                return Reply(status=401, headers={"WWW-Authenticate": 'Basic realm="test"'})
        if request.method not in ("GET", "HEAD") or (request.method == "HEAD" and not self.head):
            return Reply(status=405)
        if request.path in self._redirects:
            status, location = self._redirects[request.path]
            return Reply(status=status, headers={"Location": location})
        with self._lock:
            file = self._files.get(request.path)
            names = sorted(self._files)
        if file is not None:
            return self._file(request, file)
        folder = request.path.rstrip("/") + "/"
        if self.index and any(name.startswith(folder) for name in names):
            if folder != request.path:
                return Reply(status=301, headers={"Location": request.raw_path + "/"})
            return Reply(headers={"Content-Type": "text/html;charset=utf-8"}, body=_index(folder, names).encode())
        return Reply(status=404, body=b"no such file")

    def _file(self, request: Request, file: StoredFile) -> Reply:
        headers = {"Content-Type": "application/octet-stream"}
        tag = {"strong": file.tag, "weak": f"W/{file.tag}", "none": ""}[self.tags]
        if tag:
            headers["ETag"] = tag
        if self.dates:
            headers["Last-Modified"] = file.modified
        if self.preconditions and precondition_fails(request, tag, file.modified if self.dates else ""):
            return Reply(status=412)
        if self.ranges:
            return ranged(request, file.data, headers)
        if not self.lengths:
            return Reply(headers=headers, body=file.data, chunked=True)
        return Reply(headers={**headers, "Content-Length": str(len(file.data))}, body=file.data)


def _index(folder: str, names: list[str]) -> str:
    """A page in Apache's format: links to sort by, to the parent, and to the entries directly below."""
    below = {name[len(folder) :].partition("/") for name in names if name.startswith(folder)}
    links = sorted({first + slash for first, slash, _ in below})
    rows = "".join(f'<tr><td><a href="{quote(link)}">{html.escape(link)}</a></td></tr>' for link in links)
    return (
        f"<html><head><title>Index of {html.escape(folder)}</title></head><body><table>"
        f'<tr><th><a href="?C=N;O=D">Name</a></th></tr><tr><td><a href="/">Parent Directory</a></td></tr>{rows}'
        "</table></body></html>"
    )
