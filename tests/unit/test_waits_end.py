"""A worker thread that fails, also by a `BaseException`, leaves no waiting caller behind."""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.web_server import WebServer

import millrace
from millrace.cache.filling import Fill
from millrace.cache.reading.threads import Pools
from millrace.errors import MillraceError, OriginUnavailableError
from millrace.filesystem import MillraceFileSystem
from millrace.origin import open_origin
from millrace.origin.object_store import ObjectStoreOrigin
from millrace.origin.obstore_library import is_panic, obstore_library
from millrace.origin.store_access import Clients
from millrace.origin.web.connections import Response
from millrace.runtime.locks import NamedLocks

Make = Callable[..., MillraceFileSystem]
DEADLINE_SECONDS = 60.0
BLOCK = 8 << 20


class Collapse(BaseException):
    """As the panics of a library in Rust, and SystemExit: not an `Exception`."""


def ended(action: Callable[[], Any]) -> Any:
    """The result of `action`, or its exception; fails if it does not end in time."""
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(action())
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            outcome.put(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.get(timeout=DEADLINE_SECONDS)


# --- panics of obstore ------------------------------------------------------------------------------


def panicking_client(container: str) -> Any:
    """A client of obstore's that panics at its first request: a header cannot have this key's characters."""
    config = {"endpoint": "http://127.0.0.1:1", "access_key_id": "a\n", "secret_access_key": "b", "region": "x"}
    return obstore_library().store.S3Store(container, config=config, client_options={"allow_http": True})


@pytest.fixture
def panics(monkeypatch: pytest.MonkeyPatch) -> ObjectStoreOrigin:
    monkeypatch.setattr(Clients, "get", lambda self, container, streams=False: panicking_client(container))
    return ObjectStoreOrigin("s3", {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:1"})


def streamed(origin: ObjectStoreOrigin) -> None:
    with origin.open_writer("bucket/key") as writer:
        for _ in range(20):
            writer.write(bytes(1 << 20))


@pytest.mark.parametrize(
    "action",
    [
        lambda origin: origin.head("bucket/key"),
        lambda origin: origin.read("bucket/key", 0, 5),
        lambda origin: origin.list_level("bucket"),
        lambda origin: list(origin.list_all("bucket")),
        lambda origin: origin.put("bucket/key", b"x"),
        lambda origin: origin.delete(["bucket/one", "bucket/two"]),
        streamed,
    ],
    ids=["head", "read", "level", "all", "put", "delete", "stream"],
)
def test_panic_of_the_library_raises_a_millrace_error(
    action: Callable[[ObjectStoreOrigin], Any], panics: ObjectStoreOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.origin.object_store.first_contact", lambda url: None)
    error = ended(lambda: action(panics))
    assert isinstance(error, OriginUnavailableError), repr(error)
    assert error.is_final
    assert is_panic(error.__cause__)  # type: ignore[arg-type]


def test_panic_during_client_creation_raises_a_millrace_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Clients, container: str, streams: bool = False) -> Any:
        return obstore_library().head(panicking_client(container), "key")

    monkeypatch.setattr(Clients, "get", fail)
    error = ended(lambda: ObjectStoreOrigin("s3", {"anon": True}).head("bucket/key"))
    assert isinstance(error, OriginUnavailableError), repr(error)


def test_load_over_a_client_that_panics_ends(panics: ObjectStoreOrigin, tmp_path: Path) -> None:
    fs = millrace.filesystem(
        "s3",
        {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:1"},
        cache_dir=str(tmp_path / "cache"),
        min_free=0,
    )
    assert isinstance(ended(lambda: fs.load(["s3://bucket/prefix"])), OriginUnavailableError)


# --- loads ------------------------------------------------------------------------------------------


def files(tmp_path: Path, count: int = 3, nbytes: int = 3 * BLOCK) -> list[str]:
    (tmp_path / "data").mkdir()
    paths = [tmp_path / "data" / f"{number}.bin" for number in range(count)]
    for path in paths:
        path.write_bytes(bytes(nbytes))
    return [str(path) for path in paths]


def test_load_with_failed_workers_raises(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collapse(self: Fill, piece: range) -> Any:
        raise Collapse("gone")

    monkeypatch.setattr(Fill, "fetch", collapse)
    fs, paths = make(), files(tmp_path)
    error = ended(lambda: fs.load(paths))
    assert isinstance(error, MillraceError), repr(error)
    assert "Collapse: gone" in str(error)


def test_load_with_failed_listing_raises(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collapse(*_: Any) -> Iterator[Any]:
        raise Collapse("gone")
        yield

    monkeypatch.setattr(importlib.import_module("millrace.filesystem.loading"), "select", collapse)
    fs, paths = make(), files(tmp_path)
    assert isinstance(ended(lambda: fs.load(paths)), MillraceError)


# --- reads ------------------------------------------------------------------------------------------


def test_read_that_cannot_pause_for_another_process_ends_with_an_error(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process fetches the block, and no thread can be started to wait for it."""

    def no_thread(self: Pools, *_: Any) -> bool:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(NamedLocks, "try_acquire", lambda self, key: False)
    monkeypatch.setattr(Pools, "pause", no_thread)
    fs, (path, *_) = make(), files(tmp_path)
    error = ended(lambda: fs.cat_file(path))
    assert isinstance(error, RuntimeError), repr(error)


def test_fetch_that_is_interrupted_before_it_begins_does_not_block_the_next(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, (path, *_) = make(), files(tmp_path)

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("millrace.cache.reading.locations.FileLocation.duplicate", interrupted)
        assert isinstance(ended(lambda: fs.cat_file(path)), KeyboardInterrupt)
    assert ended(lambda: fs.cat_file(path)) == bytes(3 * BLOCK)


def test_pause_after_a_failed_pause_still_ends() -> None:
    pools = Pools(demand=ThreadPoolExecutor(1), ahead=ThreadPoolExecutor(1))
    over = threading.Event()

    def collapse() -> None:
        raise Collapse

    pools._pausing.call_after(0.0, collapse)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while pools._pausing._due and time.monotonic() < deadline:
        time.sleep(0.01)
    pools.pause(pools.demand, 0.01, over.set, lambda: None)
    assert over.wait(DEADLINE_SECONDS)
    pools.close()


def test_copy_of_a_whole_object_that_fails_ends_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    def collapse(self: Response, chunk_bytes: int = 0) -> Iterator[bytes]:
        raise Collapse
        yield b""

    with WebServer(ranges=False) as server:
        server.put("/x", bytes(1 << 20))
        monkeypatch.setattr(Response, "stream", collapse)
        origin = open_origin("http")
        error = ended(lambda: origin.read(f"{server.host}/x", 5, 10))
    assert isinstance(error, Collapse), repr(error)
