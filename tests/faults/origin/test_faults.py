"""A proxy breaks the responses of a real server: reads return the right bytes or a clear error, and no wrong byte is stored.

Over S3 (SeaweedFS), Azure (Azurite) and a web server.

Each fault is met by every kind of request: a description, the first bytes, a block in the middle, the last one, a whole
object, a small one, a listing. It is temporary in one case, and permanent in another. Then the server works again, and a new
file system over the same cache, as in a new process, reads everything right. Every stored byte is checked, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.azurite import AzuriteServer
from tests.support.versioned import PAGE, assert_store_holds_only, content, versions_in
from tests.support.web_server import WebServer

import millrace
from millrace.cache.node import close_nodes
from millrace.errors import (
    DeniedError,
    MillraceError,
    ObjectChangedError,
    OriginBusyError,
    OriginUnavailableError,
)
from millrace.origin import ObjectInfo, open_origin, store_access
from millrace.origin.limits import retrying
from millrace.origin.limits.retrying import Patience
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

BLOCK = 4 << 20
LARGE, TWO_BLOCKS, SMALL = 2 * BLOCK + 8 * PAGE, BLOCK + 8 * PAGE, 16 * PAGE
pytestmark = pytest.mark.slow  # all of them together

CONTAINER = "origin-faults"
LISTED = [f"{number:02d}.bin" for number in range(12)]


# --- kinds of requests ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """A kind of request. `read` checks the received bytes. `method` is the method of the broken requests."""

    read: Callable[[millrace.MillraceFileSystem, str, int], None]
    name: str
    method: str = "GET"
    size: int = LARGE


def _range_of(start: int, nbytes: int) -> Callable[[millrace.MillraceFileSystem, str, int], None]:
    def read(fs: millrace.MillraceFileSystem, key: str, version: int) -> None:
        data = fs.cat_file(key, start, start + nbytes)
        assert len(data) == nbytes
        assert versions_in(data, start) == {version}

    return read


def _whole(fs: millrace.MillraceFileSystem, key: str, version: int) -> None:
    data = fs.cat_file(key)
    assert data == content(version, len(data))
    assert len(data) == fs.info(key)["size"]


def _stream(fs: millrace.MillraceFileSystem, key: str, version: int) -> None:
    start = 0
    with fs.open_input_stream(key) as file:
        while data := file.read(64 * PAGE):
            assert versions_in(data, start) == {version}
            start += len(data)
    assert start == TWO_BLOCKS


def _describe(fs: millrace.MillraceFileSystem, key: str, version: int) -> None:
    assert fs.info(key)["size"] == SMALL


def _list(fs: millrace.MillraceFileSystem, key: str, version: int) -> None:
    assert [name.rsplit("/", 1)[-1] for name in fs.find(key)] == LISTED


PHASES: dict[str, Phase] = {
    "description": Phase(_describe, "described.bin", method="HEAD", size=SMALL),
    "first bytes": Phase(_range_of(0, 2 * PAGE), "ranges.bin"),
    "middle": Phase(_range_of(BLOCK + 3 * PAGE, PAGE), "ranges.bin"),
    "last block": Phase(_range_of(LARGE - 2 * PAGE, 2 * PAGE), "ranges.bin"),
    "whole": Phase(_whole, "whole.bin", size=TWO_BLOCKS),
    "stream": Phase(_stream, "stream.bin", size=TWO_BLOCKS),
    "small": Phase(_whole, "small.bin", size=SMALL),
    "listing": Phase(_list, "listed", size=0),
}


# --- the faults -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trouble:
    """A fault of the region, and the error of ours that it is where it stays.

    `only` are the phases that it can do anything to (default: all). `passes` is False where it is an error at once: trying
    again does not help. `read_timeout` (seconds) is how long a
    client lets the server be silent.
    """

    kind: Any
    error: type[MillraceError] = OriginUnavailableError
    details: Mapping[str, Any] = field(default_factory=dict)
    only: frozenset[str] = frozenset(PHASES)
    passes: bool = True
    read_timeout: float = 20.0


_FEW = frozenset({"description", "whole", "small", "listing"})
_PARTIAL = frozenset(PHASES) - {"description", "listing"}
_BODIES = frozenset(PHASES) - {"description"}

TROUBLES: dict[str, Trouble] = {
    "slow down": Trouble("status", OriginBusyError, {"status": 503}),
    "slow down for a moment": Trouble("status", OriginBusyError, {"status": 503, "retry_after": 0}),
    "too many requests": Trouble("status", OriginBusyError, {"status": 429, "code": "TooManyRequests"}),
    "internal error": Trouble("status", details={"status": 500}),
    "bad gateway": Trouble("status", details={"status": 502, "code": "BadGateway"}),
    "stall before the answer": Trouble("stall", details={"seconds": 3.0}, only=_FEW, read_timeout=1.0),
    "stall in the body": Trouble(
        "stall", details={"seconds": 3.0, "after_bytes": 1000}, only=_BODIES & _FEW, read_timeout=1.0
    ),
    "lost answer": Trouble("reset"),
    "reset in the body": Trouble("reset", details={"after_bytes": 1000}, only=_BODIES),
    "cut body": Trouble("truncate", details={"after_bytes": PAGE}, only=_PARTIAL),
    "short body": Trouble("shorten", details={"after_bytes": PAGE}, only=_PARTIAL),
    "short listing": Trouble("shorten", details={"after_bytes": 700}, only=frozenset({"listing"})),
    "no body": Trouble("shorten", details={"after_bytes": 0}, only=_PARTIAL),
    "another range": Trouble("range", only=_PARTIAL),
    "no ranges": Trouble("whole", only=_PARTIAL),
    "another version": Trouble("version", ObjectChangedError, only=_PARTIAL),
    "expired": Trouble("status", DeniedError, {"status": 400, "code": "ExpiredToken"}, passes=False),
    "refused": Trouble("status", DeniedError, {"status": 403}, passes=False),
}


# What clients of their own make of it: not of every fault, which costs time, but of each kind.
ELSEWHERE = (
    "slow down for a moment", "internal error", "lost answer", "cut body", "short body", "another range", "no ranges",
    "another version", "refused",
)  # fmt: skip

CASES = [
    *(("s3", name) for name in TROUBLES),
    *(pytest.param("az", name, marks=pytest.mark.azurite) for name in ELSEWHERE),
    *(("http", name) for name in ELSEWHERE),
]


# --- the server -----------------------------------------------------------------------------------


@dataclass
class Served:
    """A real server with an object for each phase, and the proxy before it."""

    scheme: str
    target_options: dict[str, Any]
    region: EmulatedRegion
    root: str
    versions: dict[str, int] = field(
        default_factory=lambda: {phase.name: number for number, phase in enumerate(PHASES.values(), 1)}
    )
    contents: dict[str, bytes] = field(default_factory=dict)
    """By version as the origin names it."""

    def key(self, phase: str) -> str:
        return f"{self.root}/{PHASES[phase].name}"

    @property
    def has_prefixes(self) -> bool:
        """Whether a listing requests the container, with the directory in the query."""
        return self.scheme != "http"

    def phases(self, trouble: Trouble) -> list[str]:
        """What a fault can do anything to."""
        without: set[str] = set()
        if self.scheme == "http" and trouble.kind == "status":
            without = {"description"}  # GET replaces HEAD where the server refuses it
        if self.scheme == "http" and trouble.kind == "whole":
            without = {"whole", "stream", "small"}  # one request reads all of it, and its answer is complete
        return [phase for phase in PHASES if phase in trouble.only - without]

    def break_(self, phase: str, trouble: Trouble, *, count: int | None) -> None:
        """Break the next requests of a phase."""
        path = f"*/{CONTAINER}*" if phase == "listing" and self.has_prefixes else f"*/{PHASES[phase].name}*"
        self.region.fail(trouble.kind, method=PHASES[phase].method, path=path, count=count, **trouble.details)

    def read_right(self, fs: millrace.MillraceFileSystem, phase: str) -> None:
        PHASES[phase].read(fs, self.key(phase), self.versions[PHASES[phase].name])


def _fill(served: Served, put: Callable[[str, bytes], None], head: Callable[[str], ObjectInfo]) -> None:
    """Make all objects. `put` and `head` go past the proxy."""
    for phase in PHASES.values():
        if phase.size:
            data, key = content(served.versions[phase.name], phase.size), f"{served.root}/{phase.name}"
            put(key, data)
            served.contents[head(key).version] = data
        else:
            for name in LISTED:
                put(f"{served.root}/{phase.name}/{name}", b"listed")


@contextlib.contextmanager
def _over_s3(request: pytest.FixtureRequest) -> Iterator[Served]:
    s3: S3Server = request.getfixturevalue("s3")
    s3.create_bucket(CONTAINER)
    origin = open_origin("s3", s3.target_options)
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        served = Served("s3", {**s3.target_options, "endpoint_url": region.endpoint_url}, region, f"{CONTAINER}/d")
        _fill(served, origin.put, origin.head)
        yield served


@contextlib.contextmanager
def _over_azure(request: pytest.FixtureRequest) -> Iterator[Served]:
    azurite: AzuriteServer = request.getfixturevalue("azurite")
    azurite.create_container(CONTAINER)
    origin = open_origin("az", azurite.target_options)
    server = azurite.endpoint.removesuffix(f"/{azurite.account}")
    with EmulatedRegion(server, round_trip_seconds=0.0, bytes_per_second=None) as region:
        target = {**azurite.target_options, "account_host": f"{region.endpoint_url}/{azurite.account}"}
        served = Served("az", target, region, f"{CONTAINER}/d")
        _fill(served, origin.put, origin.head)
        yield served


@contextlib.contextmanager
def _over_the_web(request: pytest.FixtureRequest) -> Iterator[Served]:
    del request
    with (
        WebServer() as server,
        EmulatedRegion(server.url.rstrip("/"), round_trip_seconds=0.0, bytes_per_second=None) as region,
    ):
        host = region.endpoint_url.removeprefix("http://")
        served = Served("http", {}, region, f"{host}/{CONTAINER}/d")
        origin = open_origin("http")
        _fill(served, lambda key, data: server.put(key.removeprefix(host), data), origin.head)
        yield served


@pytest.fixture(scope="module")
def serving(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Served]]:
    """Gives what serves a scheme, made when it is wanted for the first time."""
    made: dict[str, Served] = {}
    ways = {"s3": _over_s3, "az": _over_azure, "http": _over_the_web}
    with contextlib.ExitStack() as opened:

        def serve(scheme: str) -> Served:
            if scheme not in made:
                made[scheme] = opened.enter_context(ways[scheme](request))
            return made[scheme]

        yield serve


@pytest.fixture
def served(request: pytest.FixtureRequest, serving: Callable[[str], Served]) -> Served:
    return serving(request.param)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten patience and backoff. The decisions are the same."""
    monkeypatch.setattr(retrying, "PATIENCE", Patience(seconds=0.8, tries=3))
    monkeypatch.setattr(retrying, "backoff", lambda failures, draw: 0.01 * draw)


@pytest.fixture
def make(served: Served, tmp_path: Path) -> Iterator[Callable[..., millrace.MillraceFileSystem]]:
    def make(name: str = "cache", **options: Any) -> millrace.MillraceFileSystem:
        given = {"cache_dir": str(tmp_path / name), "min_free": 0, "consistency": "1h", **options}
        return millrace.filesystem(served.scheme, target_options=served.target_options, **given)

    served.region.clear_faults()
    yield make
    served.region.clear_faults()


def check_all(served: Served, make: Callable[..., millrace.MillraceFileSystem]) -> None:
    """With the server well again, over the same cache and with nothing in memory: everything is right."""
    served.region.clear_faults()
    close_nodes()
    fs = make(consistency="always")
    assert_store_holds_only(fs, served.contents)
    for phase in PHASES:
        served.read_right(fs, phase)
    assert assert_store_holds_only(fs, served.contents) >= 8
    assert fs.cache_counters()["corrupt_blocks"] == 0


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("served", "name"), CASES, indirect=["served"])
def test_read_during_passing_failure_succeeds(
    served: Served,
    make: Callable[..., millrace.MillraceFileSystem],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    trouble = TROUBLES[name]
    with monkeypatch.context() as changed:
        changed.setitem(store_access.CLIENT, "read_timeout", timedelta(seconds=trouble.read_timeout))
        # A gate that has closed four times since the last success is closed for longer than is patient here.
        changed.setattr(retrying, "PATIENCE", Patience(seconds=30.0, tries=10))
        fs = make()
        for phase in served.phases(trouble):
            served.break_(phase, trouble, count=1)
            # What a stream gave out already cannot be of another version than the rest.
            if not trouble.passes or (phase == "stream" and trouble.error is ObjectChangedError):
                with contextlib.suppress(trouble.error):  # not raised if a concurrent request got it: that is repeated
                    served.read_right(fs, phase)
            served.read_right(fs, phase)
            assert served.region.fault_hits() == [1], phase
            served.region.clear_faults()
    check_all(served, make)


@pytest.mark.parametrize(("served", "name"), CASES, indirect=["served"])
def test_read_during_permanent_failure_raises(
    served: Served,
    make: Callable[..., millrace.MillraceFileSystem],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    trouble = TROUBLES[name]
    busy = trouble.error is OriginBusyError
    with monkeypatch.context() as changed:
        changed.setitem(store_access.CLIENT, "read_timeout", timedelta(seconds=trouble.read_timeout))
        for phase in [phase for phase in served.phases(trouble) if not busy or phase in _FEW]:
            # A gate that is closed because of one phase would be closed for the next.
            fs = make(name=f"cache-{phase}" if busy else "cache")
            served.break_(phase, trouble, count=None)
            with pytest.raises(trouble.error) as caught:
                served.read_right(fs, phase)
            assert "\n" not in str(caught.value)
            assert CONTAINER in str(caught.value)
            assert caught.value.next_step
            hits = served.region.fault_hits()[0]
            most = 3 if phase in ("whole", "stream") else 1  # so many requests it takes, which go at once
            assert 1 <= hits <= (most if not trouble.passes else 99), phase
            served.region.clear_faults()
    check_all(served, make)


@pytest.mark.parametrize("served", ["s3"], indirect=True)
def test_open_file_continues_after_origin_failures(
    served: Served, make: Callable[..., millrace.MillraceFileSystem], tmp_path: Path
) -> None:
    """Also if credentials expired in between: the error reports it, and with new ones the same file continues."""
    key, version = served.key("middle"), served.versions[PHASES["middle"].name]
    for name in ("internal error", "cut body", "short body", "another range", "expired", "refused"):
        trouble = TROUBLES[name]
        fs = make(name=f"cache-{name}")
        for file in (fs.open(key, "rb"), fs.open_input_file(key)):
            with file:
                assert versions_in(file.read(PAGE)) == {version}
                served.break_("middle", trouble, count=None)
                file.seek(BLOCK if isinstance(file, pa.NativeFile) else 2 * BLOCK)
                with pytest.raises(trouble.error, match="expired" if name == "expired" else "origin-faults"):
                    file.read(PAGE)
                served.region.clear_faults()
                # Where it was before, and not behind what it did not give.
                start = BLOCK if isinstance(file, pa.NativeFile) else 2 * BLOCK
                assert file.tell() == start
                assert versions_in(file.read(PAGE), start) == {version}
    close_nodes()


@pytest.mark.parametrize("served", ["s3"], indirect=True)
@pytest.mark.parametrize("name", ["slow down for a moment", "internal error", "lost answer", "refused"])
def test_write_during_failures_is_atomic(
    served: Served,
    make: Callable[..., millrace.MillraceFileSystem],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """In one request and in parts, with one fault for each kind of request, at the first and at later requests."""
    monkeypatch.setattr(retrying, "PATIENCE", Patience(seconds=30.0, tries=10))
    trouble, key = TROUBLES[name], f"{served.root}/written.bin"
    fs = make()
    version = 100
    for size, method, skip in (
        (SMALL, "PUT", 0), (20 << 20, "POST", 0), (20 << 20, "PUT", 1), (20 << 20, "POST", 1),
    ):  # fmt: skip
        before = content(version, SMALL)
        fs.pipe_file(key, before)
        assert fs.cat_file(key) == before
        after = content(version + 1, size)
        served.region.fail(trouble.kind, method=method, path="*/written.bin", skip=skip, **trouble.details)
        try:
            with fs.open(key, "wb") as file:
                file.write(after)
            expected = {after}
        except MillraceError:
            if trouble.passes and trouble.kind != "reset":
                raise
            # Where the answer was lost the origin may have done it all the same.
            expected = {before, after} if trouble.kind == "reset" else {before}
        assert served.region.fault_hits() == [1]
        served.region.clear_faults()
        found = fs.cat_file(key)
        assert found in expected, (size, method, skip)
        close_nodes()
        fs = make(consistency="always")
        assert fs.cat_file(key) == found
        version += 2
    fs.rm(key)
