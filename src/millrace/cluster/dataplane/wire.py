"""The data plane's requests and responses as bytes: a strict subset of HTTP/1.1, for server and client.

Pure: bytes in, values out, and the reverse. For any input, parsing returns a value or raises `WireError`, and allocates no
memory by the numbers in it. docs/design/0010-cluster.md lists the requests.

A *framed* body is a sequence of pieces: the requested range, cut at block boundaries, each piece followed by the 8 bytes of
its xxh3 (64 bits, little-endian). `pieces` computes the same cut for both sides.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import xxhash
from typing_extensions import Buffer

from millrace.cluster.membership import WIRE_VERSION
from millrace.errors import WireError
from millrace.store import records
from millrace.store.records import BLOCK_BYTES

OBJECTS_PATH = "/v1/objects/"
REPLICA_FILES_PATH = "/v1/replica-files/"
LOAD_PATH = "/v1/load"

MAX_HEAD_BYTES = 8 << 10
"""The first line and the headers of a request or a response, with the empty line."""
MAX_HEADERS = 32
MAX_BODY_BYTES = 1 << 20
"""The body of a request other than a `PUT` of blocks, and a load order."""
MAX_ORDER_BYTES = 64 << 20
"""The body of a load order."""
MAX_FRAMED_BYTES = 64 << 20
"""The most bytes of one framed request, or of one `PUT`, without the checksums."""
SUM_BYTES = 8

_VERSION_FIELD = ("Millrace-Wire", str(WIRE_VERSION))
_MAX_DIGITS = 18  # no size has more, and parsing more would cost time
_TARGET = re.compile(r"/[!-~]*")
# The line ends only with CR LF, a name is a token that directly precedes the colon, and no value has control characters.
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)\r\n")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_STATUS = re.compile(r"HTTP/1\.1 ([1-5]\d\d)(?: [\t\x20-\x7e\x80-\xff]*)?", re.ASCII)
_OBJECT_ID = re.compile(r"[0-9a-f]{32}")
_FETCH_ID = re.compile(r"[0-9a-f-]{1,40}")
# No part begins with a dot, so that none leaves its directory or names a hidden file.
_REPLICA_NAMES = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (r"\w[\w.-]{0,99}", r"step-\d{12}(?:-r[1-9]\d{0,8})?", r"\w[\w.-]{0,199}")
)
_VALUE = re.compile(r"[\x20-\x7e\x80-\xff]*")

# If one of these were repeated, this node and a proxy could interpret it differently.
_ONCE = frozenset(
    ("authorization", "content-length", "content-range", "host", "range", "expect", "connection", "transfer-encoding")
)

Span = tuple[int, int]
"""A half-open range of bytes of an object."""


class GetMode(StrEnum):
    """What a peer may do to respond."""

    FETCH = "fetch"
    """Fetch missing blocks, if it is the owner."""
    CACHED = "cached"
    """Return cached blocks only."""


# --- objects --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectDescription:
    """The description of one object version, sufficient to fetch it. Immutable.

    `origin` is the identity of its origin, without secrets.
    """

    origin: str
    key: str
    version: str
    size: int

    # Both are computed once. `cached_property` has a lock in Python 3.11, which a fork may copy while it is held.

    def object_id(self) -> bytes:
        """Its 16 bytes in every index, the same on every node."""
        found: bytes | None = self.__dict__.get("_id")
        if found is None:
            found = self.__dict__["_id"] = records.object_id(self.origin, self.key, self.version, self.size)
        return found

    def to_header(self) -> str:
        """The value of the header `Millrace-Object`."""
        found: str | None = self.__dict__.get("_header")
        if found is None:
            text = json.dumps(self.to_json(), ensure_ascii=False, separators=(",", ":"))
            found = base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")
            self.__dict__["_header"] = found
        return found

    @classmethod
    def from_header(cls, value: str) -> ObjectDescription:
        """The reverse of `to_header`. Raises `WireError`."""
        try:
            text = base64.b64decode(value, altchars=b"-_", validate=True).decode("utf-8", "surrogatepass")
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WireError("malformed Millrace-Object") from error
        return cls.from_json(fields)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"origin": self.origin, "key": self.key, "version": self.version, "size": self.size}

    @classmethod
    def from_json(cls, value: Any) -> ObjectDescription:
        """The reverse of `to_json`; ignores unknown names. Raises `WireError`."""
        try:
            origin, key, version, size = (value[name] for name in ("origin", "key", "version", "size"))
        except (TypeError, KeyError) as error:
            raise WireError("malformed description of an object") from error
        texts = isinstance(origin, str) and isinstance(key, str) and isinstance(version, str)
        if not texts or type(size) is not int or not 0 <= size < 10**_MAX_DIGITS:
            raise WireError("malformed description of an object")
        return cls(origin, key, version, size)


def pieces(start: int, stop: int, block_bytes: int = BLOCK_BYTES) -> Iterator[Span]:
    """The pieces of a framed range: `[start, stop)` cut at the boundaries of blocks."""
    while start < stop:
        end = min(stop, (start // block_bytes + 1) * block_bytes)
        yield start, end
        start = end


def framed_bytes(span: Span) -> int:
    """The length of the framed body for a range that is not empty."""
    start, stop = span
    return stop - start + SUM_BYTES * (-(-stop // BLOCK_BYTES) - start // BLOCK_BYTES)


def pack_sum(checksum: int) -> bytes:
    """The bytes of a checksum in a framed body."""
    return checksum.to_bytes(SUM_BYTES, "little")


def sum_of(piece: Buffer) -> bytes:
    """The checksum of a piece, as bytes in a framed body."""
    return xxhash.xxh3_64_intdigest(piece).to_bytes(SUM_BYTES, "little")


# --- heads ----------------------------------------------------------------------------------------


class Request(NamedTuple):
    """The head of a request. The names of headers are in lower case, their values without the space around them."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


class ResponseHead(NamedTuple):
    """The head of a response; of an interim one (1xx) nothing follows but the next head."""

    status: int
    headers: Mapping[str, str]

    @property
    def is_interim(self) -> bool:
        """Whether the final response follows."""
        return self.status < 200

    @property
    def length(self) -> int:
        """Length of the body. Raises `WireError` without a `Content-Length`."""
        if self.status < 200 or self.status == 204:
            return 0
        return parse_number(self.headers.get("content-length"), "Content-Length")

    def is_of(self, span: Span, size: int) -> bool:
        """Whether `Content-Range`, if present, names this range and the object's size."""
        return self.headers.get("content-range") in (None, f"bytes {span[0]}-{span[1] - 1}/{size}")

    @property
    def is_hot(self) -> bool:
        """Whether the owner marked these blocks as hot."""
        return self.headers.get("millrace-hot") == "1"

    @property
    def has_lease(self) -> bool:
        """Whether a 424 comes with the lease to upload the blocks."""
        return self.headers.get("millrace-lease") == "1"


def head_bytes(received: bytes | bytearray) -> int:
    """The end of the head at the beginning of `received`, after its empty line; 0 if it is incomplete.

    Raises `WireError` (431) for more than `MAX_HEAD_BYTES`.
    """
    end = received.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    if end > 3:
        return end
    if len(received) >= MAX_HEAD_BYTES:
        raise WireError(f"a head of more than {MAX_HEAD_BYTES} bytes", status=431)
    return 0


def parse_request(head: bytes | bytearray) -> Request:
    """Parse the head of a request with its empty line. Raises `WireError` with the status of the response."""
    line, _, rest = head.decode("latin-1").partition("\r\n")
    parts = line.split(" ")
    if len(parts) != 3:
        raise WireError("malformed request line")
    method, target, version = parts
    if version != "HTTP/1.1":
        raise WireError("only HTTP/1.1 is supported", status=505 if version.startswith("HTTP/") else 400)
    if not (method.isascii() and method.isalpha() and method.isupper() and _TARGET.fullmatch(target)):
        raise WireError("malformed request line")
    headers = _parse_headers(rest)
    if "transfer-encoding" in headers:
        raise WireError("bodies need a Content-Length", status=501)
    path, _, query = target.partition("?")
    return Request(method, path, query, headers)


def parse_response_head(head: bytes | bytearray) -> ResponseHead:
    """Parse the head of a response with its empty line. Raises `WireError`."""
    line, _, rest = head.decode("latin-1").partition("\r\n")
    match = _STATUS.fullmatch(line)
    if match is None:
        raise WireError("malformed status line")
    headers = _parse_headers(rest)
    if "transfer-encoding" in headers:
        raise WireError("a response without a Content-Length")
    return ResponseHead(int(match[1]), headers)


def _parse_headers(text: str) -> dict[str, str]:
    """Header lines and the empty line after them."""
    found = _HEADER.findall(text)
    # Text that the expression skipped is missing in the sum: every line must have matched, without a rest.
    if sum(len(name) + len(value) + 3 for name, value in found) + 2 != len(text) or not text.endswith("\r\n"):
        raise WireError("malformed header line")
    if len(found) > MAX_HEADERS:
        raise WireError(f"more than {MAX_HEADERS} headers", status=431)
    headers: dict[str, str] = {}
    for name, value in found:
        lower = name.lower()
        if lower in headers and (lower in _ONCE or lower.startswith("millrace-")):
            raise WireError(f"repeated header {lower}")
        headers[lower] = value.strip(" \t")
    return headers


def _build_head(first: str, fields: Iterable[tuple[str, str]]) -> bytes:
    lines = [first]
    for name, value in fields:
        if not _VALUE.fullmatch(value):
            raise WireError(f"invalid value for the header {name}")
        lines.append(f"{name}: {value}")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    if len(head) > MAX_HEAD_BYTES:
        raise WireError(f"a head of more than {MAX_HEAD_BYTES} bytes", status=431)
    return head


# --- requests -------------------------------------------------------------------------------------


class Get(NamedTuple):
    """A request for a range of an object.

    `described` is the header `Millrace-Object` as received, or empty. It is parsed only if the node has to fetch.
    `fetch_id` is the reader's id of its fetch (`events.fetch_id`), or empty: an id of another form is ignored.
    """

    object_id: bytes
    span: Span
    mode: GetMode
    rank: int
    verify: bool
    described: str
    fetch_id: str = ""


def parse_object_path(path: str) -> bytes:
    """The id in `/v1/objects/<id>`. Raises `WireError` (404) for anything else."""
    name = path[len(OBJECTS_PATH) :]
    if not path.startswith(OBJECTS_PATH) or not _OBJECT_ID.fullmatch(name):
        raise WireError("not the id of an object", status=404)
    return bytes.fromhex(name)


def parse_get(request: Request) -> Get:
    """The `GET` of a range of an object. Raises `WireError`."""
    headers = request.headers
    object_id = parse_object_path(request.path)
    require_version(request)
    try:
        mode = GetMode(headers.get("millrace-ask", "fetch"))
    except ValueError:
        raise WireError("Millrace-Ask must be fetch or cached") from None
    return Get(
        object_id=object_id,
        span=parse_range(headers.get("range", "")),
        mode=mode,
        rank=parse_number(headers.get("millrace-rank", "0"), "Millrace-Rank"),
        verify=headers.get("millrace-verify") == "1",
        described=headers.get("millrace-object", ""),
        fetch_id=found[0] if (found := _FETCH_ID.fullmatch(headers.get("millrace-fetch", ""))) else "",
    )


def require_version(request: Request) -> None:
    """Raises `WireError` unless the request has this program's wire version."""
    version = parse_number(request.headers.get("millrace-wire", "0"), "Millrace-Wire")
    if version != WIRE_VERSION:
        raise WireError(f"wire version {version} is not supported; this node supports version {WIRE_VERSION}")


def build_get(
    what: ObjectDescription,
    span: Span,
    *,
    host: str,
    token: str,
    mode: GetMode = GetMode.FETCH,
    rank: int = 0,
    verify: bool = False,
    fetch_id: str = "",
) -> bytes:
    """The framed request for a half-open range that is not empty. Raises `WireError`."""
    fields = [*_who(host, token), ("Range", format_range(span))]
    if fetch_id:
        fields.append(("Millrace-Fetch", fetch_id))
    fields.append(_VERSION_FIELD)
    fields.append(("Millrace-Ask", mode.value))
    if mode is GetMode.FETCH:
        fields.append(("Millrace-Object", what.to_header()))
    if rank:
        fields.append(("Millrace-Rank", str(rank)))
    if verify:
        fields.append(("Millrace-Verify", "1"))
    return _build_head(f"GET {OBJECTS_PATH}{what.object_id().hex()} HTTP/1.1", fields)


class Put(NamedTuple):
    """A `PUT` of blocks: the range `[start, stop)` of an object, framed."""

    what: ObjectDescription
    start: int
    stop: int


def parse_put(request: Request) -> Put:
    """Parse a `PUT` of whole blocks, at most `MAX_FRAMED_BYTES`. Raises `WireError`."""
    what = ObjectDescription.from_header(request.headers.get("millrace-object", ""))
    if what.object_id() != parse_object_path(request.path):
        raise WireError("the object's id differs from that of its description")
    (start, stop), size = _parse_framed_put(request)
    whole = start % BLOCK_BYTES == 0 and (stop % BLOCK_BYTES == 0 or stop == size)
    if size != what.size or not whole:
        raise WireError("a PUT must contain whole blocks of its object")
    return Put(what, start, stop)


def build_put(what: ObjectDescription, start: int, stop: int, *, host: str, token: str) -> bytes:
    """The head of a `PUT` of whole blocks; the framed body follows. Raises `WireError`."""
    fields = [*_who(host, token), *_framed_put_fields((start, stop), what.size), ("Millrace-Object", what.to_header())]
    return _build_head(f"PUT {OBJECTS_PATH}{what.object_id().hex()} HTTP/1.1", fields)


def _parse_framed_put(request: Request) -> tuple[Span, int]:
    """The range that a framed `PUT` contains, at most `MAX_FRAMED_BYTES`, and the size of the whole. Raises `WireError`."""
    match = _CONTENT_RANGE.fullmatch(request.headers.get("content-range", ""))
    if match is None:
        raise WireError("a PUT needs a Content-Range")
    start, stop, size = int(match[1]), int(match[2]) + 1, int(match[3])
    if not start < stop <= size:
        raise WireError("the Content-Range of a PUT must be a range of its object or file")
    if stop - start > MAX_FRAMED_BYTES:
        raise WireError("a PUT with too many bytes", status=413)
    length = parse_number(request.headers.get("content-length"), "Content-Length", status=411)
    if length != framed_bytes((start, stop)):
        raise WireError("Content-Length differs from that of the framed bytes")
    return (start, stop), size


def _framed_put_fields(span: Span, size: int) -> list[tuple[str, str]]:
    start, stop = span
    return [
        ("Content-Range", f"bytes {start}-{stop - 1}/{size}"),
        ("Content-Length", str(framed_bytes(span))),
        _VERSION_FIELD,
    ]


# --- files of replicas of checkpoints -------------------------------------------------------------


class ReplicaName(NamedTuple):
    """A file of a replica: `run` is the name of its run, `checkpoint` that of the checkpoint's directory."""

    run: str
    checkpoint: str = ""
    file: str = ""

    @property
    def path(self) -> str:
        """The path of requests for its bytes."""
        return REPLICA_FILES_PATH + "/".join(self)


class ReplicaPut(NamedTuple):
    """A `PUT` of the bytes `[start, stop)` of a replica's file of `size` bytes, framed."""

    name: ReplicaName
    start: int
    stop: int
    size: int


def parse_replica_name(path: str, parts: int) -> ReplicaName:
    """The name in a path of one to three parts, all of which could be names of files. Raises `WireError` (404)."""
    names = path.split("/")
    if len(names) != parts or not all(map(re.Pattern.fullmatch, _REPLICA_NAMES, names)):
        raise WireError("not the name of a replica", status=404)
    return ReplicaName(*names)


def parse_replica_get(request: Request) -> tuple[ReplicaName, Span]:
    """Parse the `GET` of a range of a replica's file. Raises `WireError`."""
    require_version(request)
    name = parse_replica_name(request.path.removeprefix(REPLICA_FILES_PATH), 3)
    return name, parse_range(request.headers.get("range", ""))


def build_replica_get(name: ReplicaName, span: Span, *, host: str, token: str) -> bytes:
    """The framed request for a half-open range that is not empty. Raises `WireError`."""
    fields = [*_who(host, token), ("Range", format_range(span)), _VERSION_FIELD]
    return _build_head(f"GET {name.path} HTTP/1.1", fields)


def parse_replica_put(request: Request) -> ReplicaPut:
    """Parse a `PUT` into a replica's file, at most `MAX_FRAMED_BYTES`. Raises `WireError`."""
    require_version(request)
    name = parse_replica_name(request.path.removeprefix(REPLICA_FILES_PATH), 3)
    (start, stop), size = _parse_framed_put(request)
    return ReplicaPut(name, start, stop, size)


def build_replica_put(put: ReplicaPut, *, host: str, token: str) -> bytes:
    """The head of a `PUT` into a replica's file; the framed body follows. Raises `WireError`."""
    fields = [*_who(host, token), *_framed_put_fields((put.start, put.stop), put.size)]
    return _build_head(f"PUT {put.name.path} HTTP/1.1", fields)


# --- commands -------------------------------------------------------------------------------------


def build_command(
    method: str,
    path: str,
    *,
    host: str,
    token: str,
    query: Mapping[str, str] | None = None,
    body: bytes | None = None,
    waits: bool = True,
) -> bytes:
    """The head of a request for a JSON command with an unquoted `path`; `body` follows. Raises `WireError`.

    Without `waits` there are no interim responses.
    """
    try:
        target = quote(path, safe="/") + ("?" + urlencode(query) if query else "")
    except UnicodeError as error:
        raise WireError("invalid name of a command") from error
    fields = [*_who(host, token), *((_VERSION_FIELD,) if waits else ())]
    if body is not None:
        fields += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    return _build_head(f"{method} {target} HTTP/1.1", fields)


def _who(host: str, token: str) -> list[tuple[str, str]]:
    return [("Host", host), ("Authorization", f"Bearer {token}")]


# --- responses ------------------------------------------------------------------------------------


def build_response(status: int, fields: Iterable[tuple[str, str]] = (), *, length: int | None = None) -> bytes:
    """The head of a response; `length` is that of its body (None without one). Raises `WireError`."""
    counted = fields if length is None else (*fields, ("Content-Length", str(length)))
    return _build_head(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", counted)


def build_framed_head(span: Span, size: int, *, hot: bool = False) -> bytes:
    """The head of a framed response for a range of an object of `size` bytes."""
    heat = "Millrace-Hot: 1\r\n" if hot else ""
    return (
        f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {span[0]}-{span[1] - 1}/{size}\r\n"
        f"Millrace-Wire: {WIRE_VERSION}\r\n{heat}Content-Length: {framed_bytes(span)}\r\n\r\n"
    ).encode("ascii")


_FRAMED_HEAD = re.compile(
    rb"HTTP/1\.1 206 Partial Content\r\nContent-Range: (bytes \d{1,18}-\d{1,18}/\d{1,18})\r\n"
    rb"Millrace-Wire: \d{1,18}\r\n(Millrace-Hot: 1\r\n)?Content-Length: (\d{1,18})\r\n\r\n"
)


def parse_framed_head(head: bytes) -> ResponseHead | None:
    """A faster `parse_response_head` for heads of `build_framed_head`; None for all others."""
    match = _FRAMED_HEAD.fullmatch(head)
    if match is None:
        return None
    headers = {"content-range": match[1].decode("ascii"), "content-length": match[3].decode("ascii")}
    if match[2]:
        headers["millrace-hot"] = "1"
    return ResponseHead(206, headers)


PROCESSING = build_response(102)
"""The interim response of a server that has to fetch first."""


def error_body(message: str, code: str) -> bytes:
    """The body of a refusal."""
    return json.dumps({"error": message, "code": code}).encode()


def error_message(body: bytes) -> tuple[str, str]:
    """The reverse of `error_body`: message and code, empty for another body."""
    try:
        value: Any = json.loads(body)
        return str(value["error"]), str(value.get("code", ""))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "", ""


# --- values ---------------------------------------------------------------------------------------


def parse_number(value: str | None, name: str, *, status: int = 400) -> int:
    """A number of at most 18 decimal digits. Raises `WireError` with `status`, also for None."""
    if value is None or not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
        raise WireError(f"{name} is not a number", status=status)
    return int(value)


def parse_range(value: str) -> Span:
    """The range of a `Range` header, with both ends. Raises `WireError`."""
    match = _RANGE.fullmatch(value)
    if match is None:
        raise WireError("malformed Range")
    start, stop = int(match[1]), int(match[2]) + 1
    if stop <= start:
        raise WireError("a Range ends before it begins")
    return start, stop


def format_range(span: Span) -> str:
    """The value of a `Range` header for a half-open range that is not empty. Raises `WireError`."""
    start, stop = span
    if not 0 <= start < stop:
        raise WireError("invalid range")
    return f"bytes={start}-{stop - 1}"
