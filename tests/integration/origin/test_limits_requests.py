"""Every request takes its own slot: the requests that servers get for operations that need several.

With a limit of one request at once, a request that took a second slot would wait for itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.support.gcs_server import GcsFront
from tests.support.http_service import Reply, Request
from tests.support.hub_server import HubServer
from tests.support.waiting import wait_until
from tests.support.web_server import WebServer

from millrace.errors import DeniedError, ObjectNotFoundError, OriginBusyError, OriginUnavailableError, UsageError
from millrace.origin import Origin, open_origin
from millrace.origin.base import LimitedOrigin
from millrace.origin.limits import retrying
from millrace.origin.limits.retrying import Patience
from millrace.origin.limits.slots import BURST_SECONDS
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

FILES = 30
SPREAD = [f"/d/{number:02}.bin" for number in range(FILES)] + ["/d/deep/a.bin", "/d/deep/b.bin"]
QUESTIONS = FILES + 2 + 2  # a HEAD for each file, and two index pages


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer() as running:
        for path in SPREAD:
            running.put(path, path.encode())
        yield running


@pytest.fixture
def counted(server: WebServer) -> Iterator[EmulatedRegion]:
    """What counts before the web server; each request takes a while, so that those that go together meet."""
    with EmulatedRegion(server.url, round_trip_seconds=0.005, bytes_per_second=None) as region:
        yield region


def host(region: EmulatedRegion) -> str:
    return region.endpoint_url.removeprefix("http://")


def walked(origin: Origin, prefix: str) -> list[str]:
    return [info.key.removeprefix(prefix) for page in origin.list_all(prefix) for info in page]


def assert_rate(arrived: list[float], began: float, per_second: float) -> None:
    """No request came before a schedule that began with the first question allowed it."""
    burst = max(1, round(BURST_SECONDS * per_second))
    for number, moment in enumerate(sorted(arrived)):
        assert moment - began >= (number - burst) / per_second - 1e-3


# --- listings of web servers --------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2])
def test_web_listing_keeps_the_limit_of_requests(counted: EmulatedRegion, tmp_path: Path, most: int) -> None:
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path), "max_requests": most})
    root = host(counted)
    assert walked(origin, root) == SPREAD
    level = origin.list_level(f"{root}/d")
    assert [info.key.removeprefix(root) for info in level.objects] == SPREAD[:FILES]
    stats = counted.stats()
    assert stats.most_in_flight <= most
    assert stats.requests == (1 + QUESTIONS) + (1 + FILES)


def test_web_listing_keeps_the_rate(server: WebServer, tmp_path: Path) -> None:
    arrived: list[float] = []

    def note(request: Request, reply: Reply) -> None:
        arrived.append(time.monotonic())

    server.service.interfere(note)
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path), "request_rate": "60/s"})
    began = time.monotonic()
    assert len(walked(origin, server.host)) == len(SPREAD)
    assert len(arrived) == 1 + QUESTIONS
    assert_rate(arrived, began, 60.0)


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        ("HEAD", "/d/07.bin", {"kind": "status", "status": 503, "retry_after": 0}),
        ("HEAD", "/d/08.bin", {"kind": "status", "status": 429}),
        ("HEAD", "/d/deep/a.bin", {"kind": "reset"}),
        ("GET", "/d/deep/", {"kind": "status", "status": 500}),
    ],
)
def test_failed_request_of_a_listing_is_retried_alone(
    counted: EmulatedRegion, server: WebServer, tmp_path: Path, method: str, path: str, fault: dict[str, object]
) -> None:
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path)})
    counted.fail(**fault, method=method, path=path)  # type: ignore[arg-type]
    assert walked(origin, host(counted)) == SPREAD
    assert counted.fault_hits() == [1]
    assert counted.stats().requests == 1 + QUESTIONS + 1
    asked = [(request.method, request.path) for request in server.requests]
    assert {each for each in asked if asked.count(each) > 1} <= {(method, path)}


def test_web_listing_after_a_final_head_error_ends(server: WebServer, tmp_path: Path) -> None:
    """One of eight threads receives it while the others wait for responses. No request is sent after that."""
    raised = threading.Event()

    def refuse(request: Request, reply: Reply) -> Reply | None:
        if request.path == "/d/00.bin":
            return Reply(status=403)
        if request.method == "HEAD":
            raised.wait(300)
        return None

    server.service.interfere(refuse)
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path)})
    assert isinstance(origin, LimitedOrigin)
    try:
        with pytest.raises(DeniedError, match=r"d/00\.bin"):
            origin.list_level(f"{server.host}/d")
    finally:
        raised.set()
    wait_until(lambda: not origin.limiter_of(server.host)._held)
    # The page (after a redirect to its slash), the refused request, the stalled requests, and their replacements.
    assert server.service.count("GET") <= 2
    assert server.service.count("HEAD") <= 2 + 7


def test_web_listing_with_stalled_heads_ends_on_ctrl_c(server: WebServer, tmp_path: Path) -> None:
    program = """
import sys
import millrace
fs = millrace.filesystem("http", {"timeout": 300}, cache_dir=sys.argv[2], members="none")
try:
    fs.ls(f"http://{sys.argv[1]}/d/")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    stalled = threading.Semaphore(0)

    def stall(request: Request, reply: Reply) -> None:
        if request.method == "HEAD":
            stalled.release()
            server.service.wait(120)

    server.service.interfere(stall)
    command = [sys.executable, "-c", program, server.host, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert stalled.acquire(timeout=300)
            child.send_signal(signal.SIGINT)
            output, _ = child.communicate(timeout=300)  # a HEAD that stalls is given up later
        finally:
            child.kill()
    assert output == "interrupted\n"
    assert child.returncode == 0


def test_forked_child_lists_with_new_slots(counted: EmulatedRegion, tmp_path: Path) -> None:
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path), "max_requests": 1})
    assert walked(origin, host(counted)) == SPREAD
    pid = os.fork()
    if pid == 0:
        os._exit(0 if walked(origin, host(counted)) == SPREAD else 1)
    assert walked(origin, host(counted)) == SPREAD
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert counted.stats().most_in_flight == 1
    assert counted.stats().requests == 3 * (1 + QUESTIONS)


# --- reads that cost several requests -------------------------------------------------------------------


def test_redirect_counts_in_the_limit_of_its_target(server: WebServer, tmp_path: Path) -> None:
    """The target server refuses: the gate of the redirecting server stays open."""
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path), "max_requests": 1})
    with WebServer() as other:
        other.put("/there.bin", b"there")
        server.redirect("/moved.bin", f"{other.url}/there.bin")
        assert bytes(origin.read(f"{server.host}/moved.bin", 0, 5)) == b"there"
        other.service.interfere(lambda *_: Reply(status=429, headers={"Retry-After": "600"}))
        with pytest.raises(OriginBusyError, match=r"pause of [56].. s more"):
            origin.head(f"{server.host}/moved.bin")
        assert bytes(origin.read(f"{server.host}/d/00.bin", 0, 2)) == b"/d"
        sent = len(other.requests)
        with pytest.raises(OriginBusyError):
            origin.head(f"{other.host}/there.bin")
        assert len(other.requests) == sent


def test_download_of_a_whole_object_holds_its_slot_until_the_end(tmp_path: Path) -> None:
    pause, arrived = 0.3, dict[str, float]()

    def slow(request: Request, reply: Reply) -> Reply | None:
        arrived[request.path] = time.monotonic()
        if request.path != "/x.bin":
            return None
        return Reply(headers=reply.headers, body=reply.body, pause_seconds=pause)

    with WebServer(ranges=False) as server:
        server.put("/x.bin", b"a" * 100_000)
        server.put("/y.bin", b"other")
        server.service.interfere(slow)
        origin = open_origin("http", {}, {"cache_dir": str(tmp_path), "max_requests": 1})
        assert bytes(origin.read(f"{server.host}/x.bin", 0, 10)) == b"a" * 10  # of the first piece
        assert bytes(origin.read(f"{server.host}/y.bin", 0, 5)) == b"other"
        assert arrived["/y.bin"] - arrived["/x.bin"] >= pause
        assert isinstance(origin, LimitedOrigin)
        wait_until(lambda: not origin.limiter_of(server.host)._held)


def test_download_that_breaks_off_releases_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PATIENCE", Patience(tries=2))

    def cut(request: Request, reply: Reply) -> Reply | None:
        return Reply(headers=reply.headers, body=reply.body, stop_after=1000) if request.path == "/x.bin" else None

    with WebServer(ranges=False) as server:
        server.put("/x.bin", b"a" * 100_000)
        server.put("/y.bin", b"other")
        server.service.interfere(cut)
        origin = open_origin("http", {}, {"cache_dir": str(tmp_path), "max_requests": 1})
        with pytest.raises(OriginUnavailableError, match=r"tried 2 times"):
            origin.read(f"{server.host}/x.bin", 50_000, 50_010)
        assert server.service.count("GET", "/x.bin") == 2
        assert bytes(origin.read(f"{server.host}/y.bin", 0, 5)) == b"other"


def test_hub_requests_and_their_redirect_targets_count_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    arrived: list[float] = []

    def note(request: Request, reply: Reply) -> None:
        arrived.append(time.monotonic())

    with HubServer(large_bytes=100, page_size=3) as hub:
        files = {f"{number}.bin": bytes([number]) * (200 if number % 2 else 10) for number in range(10)}
        hub.commit("datasets", "u/r", files)
        limits = {"cache_dir": str(tmp_path), "max_requests": 1, "request_rate": "60/s"}
        origin = open_origin("hf", {"endpoint": hub.url}, limits)
        hub.service.interfere(note)
        hub.cdn.interfere(note)
        began = time.monotonic()
        for name, data in files.items():
            assert bytes(origin.read(f"datasets/u/r/{name}", 0, len(data))) == data
        assert walked(origin, "datasets/u/r/") == sorted(files)
        with pytest.raises(UsageError):
            origin.read("datasets/u/r/0.bin", 0, 11)
        with pytest.raises(ObjectNotFoundError):
            origin.head("datasets/u/r/nothing")
        assert len(arrived) == len(hub.service.requests) + len(hub.cdn.requests) > 2 * len(files)
    assert_rate(arrived, began, 60.0)


@pytest.mark.parametrize("fault", ["page", "date"])
def test_failed_page_of_a_hub_listing_is_retried_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    failed: list[str] = []

    def fail(request: Request, reply: Reply) -> Reply | None:
        wanted = "cursor" in request.target if fault == "page" else "/revision/" in request.target
        if failed or not wanted:
            return None
        failed.append(request.target)
        return Reply(status=500)

    with HubServer(page_size=3) as hub:
        commit = hub.commit("datasets", "u/r", {f"{number}.bin": b"x" for number in range(9)})
        origin = open_origin("hf", {"endpoint": hub.url}, {"cache_dir": str(tmp_path), "max_requests": 1})
        hub.service.interfere(fail)
        assert len(walked(origin, f"datasets/u/r@{commit}")) == 9
        targets = [request.target for request in hub.service.requests]
        assert len(failed) == 1
        assert [target for target in set(targets) if targets.count(target) > 1] == failed
        assert targets.count(failed[0]) == 2


# --- object stores --------------------------------------------------------------------------------------


def test_checks_of_empty_objects_take_a_slot_each(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.002, bytes_per_second=None) as region:
        limits = {"cache_dir": str(tmp_path), "max_requests": 1}
        origin = open_origin("s3", {**s3.target_options, "endpoint_url": region.endpoint_url}, limits)
        names = [f"/{number:02}" for number in range(20)]
        for name in names:
            origin.put(bucket + name, b"")
        origin.put(f"{bucket}/full", b"full")
        region.reset()
        region.fail("status", status=503, method="HEAD", path=f"/{bucket}/07")
        assert walked(origin, bucket) == [*names, "/full"]
        stats = region.stats()
        assert stats.most_in_flight == 1
        assert {kind: rows.requests for kind, rows in stats.by_kind.items() if rows.requests} == {
            "LIST": 1,
            "HEAD": 21,
            "GET": 1,  # for `Retry-After`, which obstore does not return
        }
        with pytest.raises(UsageError, match="ends past"):
            origin.read(f"{bucket}/full", 10, 20)  # which sends a second request


@pytest.fixture(params=["gs", pytest.param("az", marks=pytest.mark.azurite)])
def without_batches(
    request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path
) -> Iterator[tuple[str, EmulatedRegion, str, dict[str, object]]]:
    """A storage that removes one object by each request: scheme, what counts before it, a bucket, and the options."""
    scheme = request.param
    options: dict[str, object]
    if scheme == "az":
        azurite, where = request.getfixturevalue("azurite"), request.getfixturevalue("container")
        account = f"/{azurite.account}"
        upstream = azurite.endpoint.removesuffix(account)
        with EmulatedRegion(upstream, round_trip_seconds=0.005, bytes_per_second=None) as region:
            yield scheme, region, where, {**azurite.target_options, "account_host": region.endpoint_url + account}
        return
    with (
        GcsFront(s3) as front,
        EmulatedRegion(front.endpoint, round_trip_seconds=0.005, bytes_per_second=None) as region,
    ):
        options = {"endpoint_url": region.endpoint_url, "token": front.token()}
        yield scheme, region, request.getfixturevalue("bucket"), options


@pytest.mark.parametrize("most", [1, 2])
def test_removals_take_a_slot_each_and_are_retried_alone(
    without_batches: tuple[str, EmulatedRegion, str, dict[str, object]], tmp_path: Path, most: int
) -> None:
    scheme, region, bucket, options = without_batches
    origin = open_origin(scheme, options, {"cache_dir": str(tmp_path), "max_requests": most})
    keys = [f"{bucket}/{number:02}" for number in range(20)]
    for key in keys[1:]:  # one is missing, which is not an error
        origin.put(key, b"x")
    region.reset()
    method = "POST" if scheme == "az" else "DELETE"  # obstore sends batches to Azure, here of one
    region.fail("status", status=503, method=method, skip=6)
    origin.delete(keys)
    stats = region.stats()
    assert region.fault_hits() == [1]
    assert stats.by_method[method].requests == 21
    assert stats.most_in_flight <= most
    assert walked(origin, bucket) == []


# --- libraries of fsspec --------------------------------------------------------------------------------


class Watched(MemoryFileSystem):  # type: ignore[misc]
    """A library in memory that records its calls, and fails on demand."""

    protocol = "watched"
    calls: list[tuple[str, str, int]] = []  # noqa: RUF012 - of all instances
    failing: set[tuple[str, str]] = set()  # noqa: RUF012
    held: Callable[[], int] = staticmethod(lambda: 0)

    def _note(self, name: str, path: str) -> None:
        self.calls.append((name, path, self.held()))
        if (name, path) in self.failing:
            self.failing.discard((name, path))
            raise ConnectionResetError("reset")

    def rm_file(self, path: str) -> None:
        self._note("rm", path)
        super().rm_file(path)

    def ls(self, path: str, detail: bool = True, **options: object) -> object:
        self._note("ls", path)
        return super().ls(path, detail, **options)

    def exists(self, path: str, **options: object) -> bool:
        return True  # for the question after a failure: it is a failure


def test_calls_of_an_fsspec_library_take_a_slot_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("watched", Watched, clobber=True)
    monkeypatch.setattr(Watched, "store", {})
    monkeypatch.setattr(Watched, "pseudo_dirs", [""])
    origin = open_origin("watched", {}, {"cache_dir": str(tmp_path), "max_requests": 1, "request_rate": "200/s"})
    assert isinstance(origin, LimitedOrigin)
    keys = [f"b/{number % 3}/{number:02}" for number in range(20)]
    for key in keys:
        origin.put(key, b"x")
    budget = origin.limiter_of("b")
    monkeypatch.setattr(Watched, "held", staticmethod(lambda: len(budget._held)))
    monkeypatch.setattr(Watched, "failing", {("ls", "/b/1"), ("rm", "/b/1/07")})
    monkeypatch.setattr(Watched, "calls", [])
    assert walked(origin, "") == sorted(keys)
    assert [path for name, path, _ in Watched.calls if name == "ls"] == ["/", "/b", "/b/0", "/b/1", "/b/1", "/b/2"]
    Watched.calls.clear()
    began = time.monotonic()
    origin.delete(keys)
    removed = [path for name, path, _ in Watched.calls if name == "rm"]
    assert (len(removed), removed.count("/b/1/07"), len(set(removed))) == (21, 2, 20)
    assert {held for _, _, held in Watched.calls} == {1}
    assert time.monotonic() - began >= (21 - 200 * BURST_SECONDS) / 200
    assert walked(origin, "") == []
