"""An S3 server that keeps everything in memory and asks for no credentials: what storage costs when it costs nothing.

    with MemoryS3(log) as s3, EmulatedRegion(s3.endpoint_url, bytes_per_second=200e6) as region: ...

`MemoryS3(log, computed={"/bucket/key": size, ...})` also serves objects of any size whose bytes it computes, as
`tests.support.computed.ComputedOrigin` does for these keys without the bucket.

For measuring clients only. The real server of `millrace.testing` takes uploads more slowly than the region that stands
before it; this one is faster than any region that is emulated here, so the region alone is the limit. It knows what
checkpoints need: objects, ranges, conditional and multipart uploads, listings, single and bulk deletes.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
import urllib.parse
import xml.sax.saxutils as xml
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.computed import ComputedOrigin
from typing_extensions import Buffer

from millrace.testing.process import ChildProcess, free_ports, log_tail

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Computed:
    """The bytes `[start, stop)` of a computed object: like a `memoryview`, but sent piece by piece."""

    origin: ComputedOrigin
    key: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> _Computed:
        return replace(self, start=self.start + part.start, stop=self.start + part.stop)

    def pieces(self) -> Iterator[Buffer]:
        for start in range(self.start, self.stop, _PIECE_BYTES):
            yield self.origin.expected(self.key, start, min(start + _PIECE_BYTES, self.stop))


_OBJECTS: dict[str, tuple[memoryview | _Computed, str]] = {}
_UPLOADS: dict[str, dict[int, memoryview]] = {}
_LOCK = threading.Lock()
_COUNTER = iter(range(1, 1 << 62))


class MemoryS3:
    """The server as a process of its own. A context manager."""

    def __init__(self, log: Path, *, computed: Mapping[str, int] | None = None) -> None:
        self._log = log
        self._computed = dict(computed or {})
        (self._port,) = free_ports(1)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> MemoryS3:
        command = [sys.executable, "-m", "benchmarks.memory_s3", str(self._port), json.dumps(self._computed)]
        self._process = ChildProcess(command, log=self._log, cwd=Path(__file__).resolve().parent.parent)
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return self
            time.sleep(0.05)
        self._process.stop()
        raise RuntimeError(f"the server in memory does not start: {log_tail(self._log)}")

    def __exit__(self, *_: object) -> None:
        self._process.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        self.send_response_only(100)
        self.end_headers()
        self.wfile.flush()
        return True

    def _parse(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        return urllib.parse.unquote(url.path), dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

    def _body(self) -> memoryview:
        data = bytearray(int(self.headers.get("content-length", 0)))
        view, position = memoryview(data), 0
        while position < len(data):
            count = self.rfile.readinto(view[position:])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError
            position += count
        if "aws-chunked" in self.headers.get("content-encoding", ""):
            raise ValueError("aws-chunked bodies are not for this server")
        return view.toreadonly()

    def _answer(self, status: int, body: memoryview | bytes | _Computed = b"", **headers: str) -> None:
        self.send_response(status)
        if status not in (204, 304):
            headers.setdefault("content_length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            for piece in body.pieces() if isinstance(body, _Computed) else (body,):
                self.wfile.write(piece)
        self.wfile.flush()

    def _missing(self) -> None:
        self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", content_type="application/xml")

    def do_PUT(self) -> None:
        key, query = self._parse()
        body = self._body()
        tag = f'"{next(_COUNTER):032x}"'
        source = urllib.parse.unquote(self.headers.get("x-amz-copy-source", ""))
        with _LOCK:
            if source:
                _OBJECTS[key] = (_OBJECTS["/" + source.lstrip("/")][0], tag)
                self._xml("CopyObjectResult", f"<ETag>{xml.escape(tag)}</ETag>")
                return
            if "uploadId" in query:
                _UPLOADS[query["uploadId"]][int(query["partNumber"])] = body
            elif self.headers.get("if-none-match") == "*" and key in _OBJECTS:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            else:
                _OBJECTS[key] = (body, tag)
        self._answer(200, etag=tag)

    def do_POST(self) -> None:
        key, query = self._parse()
        body = bytes(self._body()).decode()
        if "uploads" in query:
            upload = f"{next(_COUNTER):032x}"
            _UPLOADS[upload] = {}
            text = f"<Bucket>b</Bucket><Key>{xml.escape(key)}</Key><UploadId>{upload}</UploadId>"
            self._xml("InitiateMultipartUploadResult", text)
        elif "uploadId" in query:
            parts = _UPLOADS.pop(query["uploadId"])
            tag = f'"{next(_COUNTER):032x}"'
            with _LOCK:
                _OBJECTS[key] = (memoryview(b"".join(parts[number] for number in sorted(parts))), tag)
            self._xml("CompleteMultipartUploadResult", f"<Key>{xml.escape(key)}</Key><ETag>{xml.escape(tag)}</ETag>")
        else:  # bulk delete
            for name in re.findall(r"<Key>(.*?)</Key>", body):
                _OBJECTS.pop(f"{key.rstrip('/')}/{xml.unescape(name)}", None)
            self._xml("DeleteResult", "")

    def do_DELETE(self) -> None:
        key, query = self._parse()
        if "uploadId" in query:
            _UPLOADS.pop(query["uploadId"], None)
        _OBJECTS.pop(key, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        key, query = self._parse()
        bucket, _, rest = key.lstrip("/").partition("/")
        if not rest:
            self._list(bucket, query)
            return
        found = _OBJECTS.get(key)
        if found is None:
            self._missing()
            return
        data, tag = found
        about = {"etag": tag, "last_modified": formatdate(usegmt=True), "accept_ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        if self.command == "HEAD":
            self._answer(200, **about, content_length=str(len(data)))
        elif wanted:
            first, last = wanted.groups()
            start = min(int(first), len(data)) if first else max(0, len(data) - int(last))
            stop = min(len(data), int(last) + 1) if first and last else len(data)
            self._answer(206, data[start:stop], **about, content_range=f"bytes {start}-{stop - 1}/{len(data)}")
        else:
            self._answer(200, data, **about)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        folders: dict[str, None] = {}
        lines = []
        with _LOCK:
            inside = {key: value for key, value in _OBJECTS.items() if key.startswith(f"/{bucket}/")}
        objects = sorted((key[len(bucket) + 2 :], *value) for key, value in inside.items())
        for key, data, tag in objects:
            if not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders[prefix + head + cut] = None
                continue
            lines.append(
                f"<Contents><Key>{xml.escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{xml.escape(tag)}</ETag><Size>{len(data)}</Size></Contents>"
            )
        lines += [f"<CommonPrefixes><Prefix>{xml.escape(name)}</Prefix></CommonPrefixes>" for name in folders]
        self._xml("ListBucketResult", f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>" + "".join(lines))

    def _xml(self, name: str, content: str) -> None:
        self._answer(200, f'<?xml version="1.0"?><{name}>{content}</{name}>'.encode(), content_type="application/xml")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def _compute(sizes: Mapping[str, int]) -> None:
    keys = {path: path.split("/", 2)[2] for path in sizes}
    origin = ComputedOrigin({key: sizes[path] for path, key in keys.items()})
    for path, key in keys.items():
        _OBJECTS[path] = (_Computed(origin, key, 0, sizes[path]), f'"{next(_COUNTER):032x}"')


if __name__ == "__main__":
    _compute(json.loads(sys.argv[2]))
    _Server(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
