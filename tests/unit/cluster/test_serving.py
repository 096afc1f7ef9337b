"""Serving blocks from disk, as the owner, and refusals; over real sockets, from real stores."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.integration.security.test_plane import Authority
from tests.support.harms import flip
from tests.support.planes import ME, Plane, Views
from tests.support.seen_events import seen_events
from tests.support.waiting import wait_until
from tests.support.wire_client import TOKEN, unframed

from millrace.cache.node import close_nodes
from millrace.cluster.dataplane import wire
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.wire import GetMode, ObjectDescription
from millrace.cluster.membership import Member
from millrace.cluster.owning import UploadLeases
from millrace.cluster.placement import Placement
from millrace.cluster.serving import Heat
from millrace.errors import DeniedError, ObjectChangedError, ObjectNotFoundError, OriginUnavailableError
from millrace.runtime.maintenance import run_tasks
from millrace.store.records import BLOCK_BYTES, PAGE_BYTES

LARGE = BLOCK_BYTES * 3 + 12345
SMALL = 300_000


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with Plane(tmp_path / "cache") as plane:
        yield plane


def random(nbytes: int) -> bytes:
    return os.urandom(nbytes)


def not_mine(views: Views, what: ObjectDescription) -> int:
    """Make others the owners; returns how many come before this node."""
    views.become(ME, *(f"other-{number}" for number in range(30)))
    order = [member.id for member in Placement(views.view()).order(what.object_id())]
    return order.index(ME) if ME in order else len(order)


@pytest.mark.parametrize("nbytes", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("filled", [True, False], ids=["cached", "fetched"])
def test_range_is_served_as_at_the_origin(plane: Plane, nbytes: int, filled: bool) -> None:
    data = random(nbytes)
    what = plane.put("b/x", data)
    if filled:
        plane.fill("b/x")
    ranges = [(0, 1), (0, nbytes), (nbytes - 1, nbytes), (1000, 17_384), (nbytes // 2, nbytes)]
    with plane.client() as client:
        for span in ranges:
            head, body = client.get(what, span)
            assert (head.status, body) == (206, data[slice(*span)])
            assert head.headers["content-range"] == f"bytes {span[0]}-{span[1] - 1}/{nbytes}"
    assert plane.origin.bytes_read() == nbytes
    assert plane.counters()["served_requests"] == len(ranges)
    assert plane.counters()["served_bytes"] == sum(stop - start for start, stop in ranges)


def test_request_for_cached_blocks_fetches_nothing(plane: Plane) -> None:
    what = plane.put("b/x", random(LARGE))
    with plane.client() as client:
        assert client.cached(what, (0, 10))[0].status == 404
        plane.fill("b/x", range(1, 2))
        assert client.cached(what, (0, 10))[0].status == 404
        assert client.cached(what, (BLOCK_BYTES, BLOCK_BYTES + 10))[0].status == 206
        assert client.cached(what, (BLOCK_BYTES, 2 * BLOCK_BYTES + 1))[0].status == 404
    assert plane.origin.bytes_read() == BLOCK_BYTES


def test_part_of_a_missing_block_is_fetched_without_the_rest(plane: Plane) -> None:
    data = random(LARGE)
    what = plane.put("b/x", data)
    spans = [(2 * BLOCK_BYTES - 1000, 2 * BLOCK_BYTES + PAGE_BYTES), (2 * BLOCK_BYTES - 10, 2 * BLOCK_BYTES + 10)]
    with plane.client() as client:
        for start, stop in spans:
            assert client.get(what, (start, stop))[1] == data[start:stop]
            assert plane.origin.bytes_read() == 2 * PAGE_BYTES
        assert client.get(what, (0, LARGE))[1] == data
    assert plane.origin.bytes_read() == LARGE


def test_block_requested_by_many_is_fetched_once(plane: Plane) -> None:
    data = random(LARGE)
    what = plane.put("b/x", data)
    together = threading.Barrier(8)

    def mode(number: int) -> bytes:
        with plane.client() as client:
            together.wait()
            return client.get(what, (number, LARGE))[1]

    with ThreadPoolExecutor(8) as pool:
        assert all(body == data[number:] for number, body in enumerate(pool.map(mode, range(8))))
    assert plane.origin.bytes_read() == LARGE


def test_fetch_in_progress_sends_interim_responses(plane: Plane) -> None:
    what = plane.put("b/x", random(SMALL))
    go_on = threading.Event()
    plane.origin.before_read = lambda *_: go_on.wait(120) and None
    with plane.client() as client:
        client.socket.sendall(wire.build_get(what, (0, 10), host="x", token=client.token))
        assert client.receive(2 * len(wire.PROCESSING)) == wire.PROCESSING * 2
        go_on.set()
        assert client.answer()[0].status == 206


def test_empty_object_is_served(plane: Plane) -> None:
    what = plane.put("b/empty", b"")
    with plane.client() as client:
        assert client.get(what, (0, 1))[0].status == 416


def test_fetch_depends_on_the_rank_of_the_request(plane: Plane) -> None:
    what = plane.put("b/x", random(SMALL))
    before = not_mine(plane.views, what)
    if not 0 < before < 8:  # by the ids' hashes; another key then has another order
        number = 0
        while not 0 < before < 8:
            number += 1
            what = plane.put(f"b/x{number}", random(SMALL))
            before = not_mine(plane.views, what)
    with plane.client() as client:
        assert client.get(what, (0, 10))[0].status == 421
        assert client.get(what, (0, 10), rank=before - 1)[0].status == 421
        assert plane.origin.count("read") == 0
        assert client.get(what, (0, 10), rank=before)[0].status == 206
        assert client.get(what, (0, 10))[0].status == 206  # it is cached now, for any owner


@pytest.mark.parametrize(
    ("error", "status"), [(ObjectNotFoundError("gone"), 410), (OriginUnavailableError("down"), 502)]
)
def test_fetch_with_an_origin_error_returns_its_status(plane: Plane, error: Exception, status: int) -> None:
    what = plane.put("b/x", random(LARGE))

    def refuse(*_: object) -> None:
        raise error

    plane.origin.before_read = refuse
    with plane.client() as client:
        head, body = client.get(what, (0, 10))
        assert head.status == status
        assert wire.error_message(body) == (str(error), error.code)  # type: ignore[attr-defined]
        plane.origin.before_read = None
        assert client.get(what, (0, 10))[0].status == 206


def test_fetch_of_a_changed_object_is_refused(plane: Plane) -> None:
    what = plane.put("b/x", random(LARGE))
    plane.put("b/x", random(LARGE))
    with plane.client() as client:
        assert client.get(what, (0, 10))[0].status == 409


def test_description_of_another_object_is_refused(plane: Plane) -> None:
    what = plane.put("b/x", random(SMALL))
    other = plane.put("b/secret", random(SMALL))
    with plane.client() as client:
        request = wire.build_get(what, (0, 10), host="x", token=client.token)
        client.socket.sendall(request.replace(what.to_header().encode(), other.to_header().encode()))
        assert client.answer()[0].status == 400
    assert plane.origin.count("read") == 0


# --- without access to the origin ---------------------------------------------------------------------


def keep_leases(plane: Plane) -> None:
    """Let no upload lease expire during a test."""
    plane.service._owning._leases = UploadLeases(seconds=600)


@pytest.mark.parametrize("nbytes", [LARGE, SMALL], ids=["large", "small"])
def test_upload_lease_is_given_to_the_first_reader(
    tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.cluster.owning._WAIT_FOR_OTHERS_SECONDS", 120.0)
    data = random(nbytes)
    with Plane(tmp_path, access=False) as plane, plane.client() as first, plane.client() as second:
        keep_leases(plane)
        what = plane.put("b/x", data)
        head, _ = first.get(what, (0, nbytes))
        assert (head.status, head.has_lease) == (424, True)
        second.socket.sendall(wire.build_get(what, (0, nbytes), host="x", token=second.token))
        second.socket.recv(1, socket.MSG_PEEK)  # an interim response
        stop = min(2 * BLOCK_BYTES, nbytes)
        assert first.put(what, 0, data[:stop]).status == 204
        if stop < nbytes:
            assert first.put(what, stop, data[stop:]).status == 204
        assert unframed(second.answer()[1], (0, nbytes)) == data
        assert second.interims > 0
        assert first.cached(what, (5, nbytes))[1] == data[5:]
        assert plane.origin.count("read") == 0


def test_owner_with_refused_credentials_grants_an_upload_lease(plane: Plane) -> None:
    what = plane.put("b/x", random(LARGE))

    def refuse(*_: object) -> None:
        raise DeniedError("no")

    plane.origin.before_read = refuse
    with plane.client() as client:
        head, _ = client.get(what, (0, 10))
        assert (head.status, head.has_lease) == (424, True)


def test_reader_waiting_for_an_upload_is_refused_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cluster.owning._WAIT_FOR_OTHERS_SECONDS", 1.0)
    with Plane(tmp_path, access=False) as plane, plane.client() as first, plane.client() as second:
        keep_leases(plane)
        what = plane.put("b/x", random(SMALL))
        assert first.get(what, (0, 10))[0].has_lease
        head, _ = second.get(what, (0, 10))
        assert (head.status, head.has_lease, second.interims > 0) == (424, False, True)


def test_upload_of_a_block_that_a_reader_of_this_machine_fetches_is_answered(tmp_path: Path) -> None:
    """Without interim responses, a healthy node would count as silent."""
    data = random(BLOCK_BYTES)
    reading, read = threading.Event(), threading.Event()
    with Plane(tmp_path, access=False) as plane, plane.client() as client:
        what = plane.put("b/x", data)

        def slowly(*_: object) -> None:
            reading.set()
            assert read.wait(300)

        plane.origin.before_read = slowly
        fetching = threading.Thread(target=plane.fill, args=("b/x",))
        fetching.start()
        try:
            assert reading.wait(300)
            head = wire.build_put(what, 0, BLOCK_BYTES, host="x", token=client.token)
            client.socket.sendall(head + data + wire.sum_of(data))
            assert client.socket.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 102"
        finally:
            read.set()
            fetching.join()
        assert client.answer()[0].status == 204


def test_upload_with_wrong_bytes_is_not_stored(tmp_path: Path) -> None:
    data = random(LARGE)
    with Plane(tmp_path, access=False) as plane:
        what = plane.put("b/x", data)
        with plane.client() as client:
            head = wire.build_put(what, 0, BLOCK_BYTES, host="x", token=client.token)
            client.socket.sendall(head + data[:BLOCK_BYTES] + bytes(8))
            assert client.answer()[0].status == 400
        with plane.client() as client:
            assert client.cached(what, (0, 10))[0].status == 404
            assert client.put(what, 0, data[:BLOCK_BYTES]).status == 204
            assert client.cached(what, (0, 10))[1] == data[:10]


def test_upload_without_space_is_refused(tmp_path: Path) -> None:
    data = random(LARGE)
    with Plane(tmp_path, access=False, capacity="1MB") as plane, plane.client() as client:
        what = plane.put("b/x", data)
        assert client.put(what, 0, data[:BLOCK_BYTES]).status == 507


def test_fetch_without_space_is_served_from_memory(tmp_path: Path) -> None:
    data = random(LARGE)
    with Plane(tmp_path, capacity="1MB") as plane, plane.client() as client:
        what = plane.put("b/x", data)
        assert client.get(what, (0, LARGE))[1] == data
        assert client.get(what, (0, len(data)))[1] == data


def test_upload_to_another_member_is_refused(tmp_path: Path) -> None:
    data = random(SMALL)
    with Plane(tmp_path, access=False) as plane, plane.client() as client:
        what = plane.put("b/x", data)
        number = 0
        while not_mine(plane.views, what) < 3:
            number += 1
            what = plane.put(f"b/x{number}", data)
        assert client.put(what, 0, data).status == 421


# --- bad days -----------------------------------------------------------------------------------------


def data_file(plane: Plane, what: ObjectDescription) -> Path:
    disk = plane.node.open_disks[0]
    entry = disk.store.index.get(what.object_id())
    assert entry is not None
    if entry.place:
        return disk.store.directory / "segments" / f"{entry.place}.data"
    return Path(disk.store.path(entry))


def sealed(plane: Plane, what: ObjectDescription) -> bool:
    entry = plane.node.open_disks[0].store.index.get(what.object_id())
    return entry is not None and entry.sealed


@pytest.mark.parametrize("nbytes", [LARGE, SMALL], ids=["large", "small"])
def test_damaged_block_is_never_served(tmp_path: Path, nbytes: int) -> None:
    data = random(nbytes)
    with Plane(tmp_path) as before:
        what = before.put("b/x", data)
        before.fill("b/x")
        path = data_file(before, what)
    close_nodes()
    offset = 100 if nbytes == LARGE else path.read_bytes().index(data) + 100
    flip(path, offset)
    with Plane(tmp_path, before.origin) as plane, plane.client() as client:
        # A part of a block is verified before; the wrong one is fetched again.
        assert client.get(what, (50, 200))[1] == data[50:200]
        assert plane.counters()["corrupt_blocks"] == 1
        assert client.get(what, (0, nbytes))[1] == data
        # Otherwise the sealing, which verifies every block, may find and drop the next wrong one first.
        deadline = time.monotonic() + 120
        while nbytes == LARGE and not sealed(plane, what):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        flip(
            data_file(plane, what), offset if nbytes == LARGE else data_file(plane, what).read_bytes().index(data) + 100
        )
        # A whole block is sent as stored with the checksum from the index: the receiver detects the damage.
        stop = min(nbytes, BLOCK_BYTES)
        client.socket.sendall(wire.build_get(what, (0, stop), host="x", token=client.token, mode=GetMode.CACHED))
        head, body = client.answer()
        assert head.status == 206
        assert body[stop:] != wire.sum_of(body[:stop])
        assert client.cached(what, (0, stop), verify=True)[0].status == 404
        assert client.get(what, (0, stop), verify=True)[1] == data[:stop]


def test_part_of_a_block_that_was_dropped_is_fetched_again(plane: Plane) -> None:
    data = random(LARGE)
    what = plane.put("b/x", data)
    plane.fill("b/x", range(2))
    disk = plane.node.open_disks[0]
    entry = disk.store.index.get(what.object_id())
    assert entry is not None
    with plane.client() as client:
        assert client.get(what, (100, 200))[1] == data[100:200]
        flip(data_file(plane, what), 150)
        descriptor = disk.store.open_data(entry)
        assert disk.store.read_block(entry, descriptor, 0) is None  # as another process of the node finds it
        os.close(descriptor)
        assert client.get(what, (100, 200))[1] == data[100:200]


def test_eviction_does_not_break_a_response(plane: Plane) -> None:
    data = random(LARGE) * 4  # more than a socket's buffers
    what = plane.put("b/x", data)
    plane.fill("b/x")
    span = (0, len(data))
    with plane.client() as client:
        client.socket.sendall(wire.build_get(what, span, host="x", token=client.token, mode=GetMode.CACHED))
        client.socket.recv(1, 2)  # MSG_PEEK: it has begun, and waits for a reader
        plane.node.open_disks[0].remove(what.object_id())
        head, body = client.answer()
        assert head.status == 206
        assert unframed(body, span) == data
        assert client.cached(what, (0, 10))[0].status == 404


def test_request_for_more_than_the_limit_is_refused(plane: Plane) -> None:
    what = replace(plane.put("b/x", random(SMALL)), size=2 * wire.MAX_FRAMED_BYTES)
    with plane.client() as client:
        assert client.get(what, (0, wire.MAX_FRAMED_BYTES + 1))[0].status == 416
    assert plane.origin.count("read") == 0


def test_truncated_file_is_fetched_again(plane: Plane) -> None:
    data = random(LARGE)
    what = plane.put("b/x", data)
    for span in ((BLOCK_BYTES, 2 * BLOCK_BYTES), (0, LARGE), (BLOCK_BYTES + 9, 2 * BLOCK_BYTES - 1)):
        plane.fill("b/x")
        with plane.client() as client:
            assert client.get(what, span)[1] == data[slice(*span)]
            os.truncate(data_file(plane, what), BLOCK_BYTES + 5)
            assert client.get(what, span)[1] == data[slice(*span)]


def test_file_truncated_during_a_response_ends_it(plane: Plane) -> None:
    data = random(LARGE) * 4  # more than a socket's buffers
    what = plane.put("b/x", data)
    plane.fill("b/x")
    span = (0, len(data))
    with plane.client() as client:
        client.socket.sendall(wire.build_get(what, span, host="x", token=client.token, mode=GetMode.CACHED))
        client.socket.recv(1, socket.MSG_PEEK)
        os.truncate(data_file(plane, what), BLOCK_BYTES + 5)
        with pytest.raises(ConnectionError):
            client.answer()


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
def test_unreadable_block_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tls: bool) -> None:
    """The node that has it works: readers must not count it as gone at each read of this block."""
    data = random(LARGE)
    tls = Authority(tmp_path, "ours").member("node") if with_tls else None
    with Plane(tmp_path / "cache", server={"tls": tls}) as plane, closing(PeerClient(token=TOKEN, tls=tls)) as client:
        what = plane.put("b/x", data)
        plane.fill("b/x")
        bad = data_file(plane, what).stat()

        def failing(read: Callable[..., Any], place: int) -> Callable[..., Any]:
            def replaced(*arguments: Any) -> Any:
                if os.path.samestat(os.fstat(arguments[place]), bad):
                    raise OSError(errno.EIO, "Input/output error")
                return read(*arguments)

            return replaced

        monkeypatch.setattr(os, "sendfile", failing(os.sendfile, 1))
        monkeypatch.setattr(os, "pread", failing(os.pread, 0))
        member = Member(id=ME, address=plane.address)
        with seen_events() as seen:
            assert (
                client.read(member, what, (0, BLOCK_BYTES), mode=GetMode.FETCH, deadline=60.0).data
                == data[:BLOCK_BYTES]
            )
        assert "cache.disk.failed" in [event.name for event in seen]


def test_removed_file_is_fetched_again(tmp_path: Path) -> None:
    data = random(LARGE)
    with Plane(tmp_path) as plane, plane.client() as client:
        what = plane.put("b/x", data)
        plane.fill("b/x")
        data_file(plane, what).unlink()
        assert client.get(what, (5, LARGE))[1] == data[5:]
        small = plane.put("b/s", data[:SMALL])
        plane.fill("b/s")
        data_file(plane, small).unlink()
        assert client.get(small, (5, SMALL))[1] == data[5:SMALL]


def test_bytes_under_concurrent_changes_are_right(tmp_path: Path) -> None:
    """Eight clients read while objects are removed, damaged and fetched again, in a cache that is too small."""
    with Plane(tmp_path, capacity="40MB") as plane:
        contents = {f"b/{number}": random(SMALL if number % 2 else LARGE) for number in range(6)}
        described = {key: plane.put(key, data) for key, data in contents.items()}
        ended = threading.Event()

        def disturb() -> None:
            number = 0
            while not ended.wait(0.002):
                number += 1
                what = described[f"b/{number % 6}"]
                if number % 3 == 0:
                    plane.node.open_disks[0].remove(what.object_id())
                elif number % 7 == 0:
                    plane.service._objects.sweep()

        def read(seed: int) -> int:
            source = Random(seed)
            served = 0
            with plane.client() as client:
                while served < 60:
                    key, data = source.choice(list(contents.items()))
                    start = source.randrange(len(data))
                    stop = min(len(data), start + source.choice([1, 16_384, 262_144, 5 << 20]))
                    if source.random() < 0.3:
                        start, stop = 0, min(len(data), BLOCK_BYTES)
                    head, body = client.get(described[key], (start, stop), verify=source.random() < 0.05)
                    if head.status == 503:  # it was removed three times while it was looked at
                        continue
                    assert (head.status, body) == (206, data[start:stop])
                    served += 1
            return served

        with ThreadPoolExecutor(9) as pool:
            disturbing = pool.submit(disturb)
            try:
                assert sum(pool.map(read, range(8))) == 8 * 60
            finally:
                ended.set()
            disturbing.result()


def open_files(plane: Plane) -> list[str]:
    base = str(plane.node.open_disks[0].store.directory)
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(f"{base}/objects"):
            found.append(target)
    return found


def test_removed_object_is_closed(plane: Plane) -> None:
    what = plane.put("b/x", random(LARGE))
    with plane.client() as client:
        plane.fill("b/x", range(1))
        assert client.get(what, (0, 10))[0].status == 206
        run_tasks()
        wait_until(lambda: len(open_files(plane)) == 1)
        plane.node.open_disks[0].remove(what.object_id())
        for _ in range(3):
            run_tasks()
        assert open_files(plane) == []


def test_small_objects_share_segment_files(plane: Plane) -> None:
    data = random(SMALL)
    with plane.client() as client:
        for number in range(10):
            what = plane.put(f"b/{number}", data)
            plane.fill(f"b/{number}")
            assert client.get(what, (5, SMALL))[1] == data[5:]
        assert len(plane.service._objects) == 10
        assert len(plane.service._objects._segments._open) == 1
        plane.node.open_disks[0]._evict_segment(next(iter(plane.service._objects._segments._open))[1])
        assert client.cached(what, (5, SMALL))[0].status == 404
        for _ in range(3):
            run_tasks()
        assert not plane.service._objects._segments._open


def test_open_files_are_bounded(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane.service._objects, "_max_open", 3)
    with plane.client() as client:
        for number in range(6):
            what = plane.put(f"b/{number}", random(BLOCK_BYTES + 1))
            plane.fill(f"b/{number}", range(1))
            assert client.get(what, (0, 10))[0].status == 206
    assert len(plane.service._objects) == 3
    wait_until(lambda: len(open_files(plane)) == 3)  # the fetches that filled the blocks close theirs


def test_bytes_without_native_are_verified_every_time(tmp_path: Path) -> None:
    data = random(LARGE)
    with Plane(tmp_path, native=False) as plane, plane.client() as client:
        what = plane.put("b/x", data)
        for _ in range(2):
            assert client.get(what, (50, 200))[1] == data[50:200]
            flip(data_file(plane, what), 100)
        assert client.get(what, (50, 200))[1] == data[50:200]
        assert plane.counters()["corrupt_blocks"] == 2


# --- heat and leases --------------------------------------------------------------------------------


def test_object_with_many_requests_is_hot(plane: Plane) -> None:
    what = plane.put("b/x", random(SMALL))
    with plane.client() as client:
        assert [client.get(what, (0, SMALL))[0].is_hot for _ in range(9)] == [False] * 8 + [True]


def test_heat_decreases_and_is_bounded() -> None:
    now = [0.0]
    heat = Heat(clock=lambda: now[0], max_blocks=10)
    key = (b"x" * 16, 0)
    assert [heat.count(key, 5, 10) for _ in range(17)][-2:] == [False, True]
    now[0] = 31.0
    assert heat.count(key, 1, 10)  # earlier counts are valid for another half minute
    now[0] = 95.0
    assert not heat.count(key, 1, 10)
    for number in range(100):
        heat.count((bytes(16), number), 1, 10)
    assert len(heat) <= 20


def test_upload_lease_after_its_end_or_timeout_can_be_taken_again() -> None:
    now = [0.0]
    leases = UploadLeases(seconds=5, clock=lambda: now[0])
    assert leases.take(b"x", [1, 2])
    assert not leases.take(b"x", [2, 3])
    assert leases.take(b"y", [2])
    leases.end(b"x", 2)
    assert leases.take(b"x", [2, 3])
    now[0] = 6.0
    assert leases.take(b"x", [1, 2, 3])


def test_request_of_many_parts_returns_the_first_error_at_once(plane: Plane) -> None:
    """Also while other parts are still being fetched; their reader is closed after its last use."""
    what = plane.put("b/x", random(8 * BLOCK_BYTES))
    go_on = threading.Event()

    def read(_key: str, start: int, _stop: int) -> None:
        if start:
            raise ObjectChangedError("b/x was overwritten", next_step="open it again")
        go_on.wait(120)

    plane.origin.before_read = read
    before = len(os.listdir("/proc/self/fd"))
    with plane.client() as client:
        assert client.get(what, (0, 8 * BLOCK_BYTES))[0].status == 409
        assert not go_on.is_set()
        go_on.set()
    deadline = time.monotonic() + 120
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_upload_during_a_failing_fetch_is_stored(plane: Plane) -> None:
    data = random(SMALL)
    what = plane.put("b/x", data)
    begun, go_on = threading.Event(), threading.Event()

    def fails(*_: object) -> None:
        begun.set()
        go_on.wait(120)
        raise OriginUnavailableError("the origin is down", next_step="try again")

    plane.origin.before_read = fails
    with plane.client() as asker, plane.client() as bringer, ThreadPoolExecutor(2) as pool:
        asked = pool.submit(asker.get, what, (0, 10))
        assert begun.wait(120)
        brought = pool.submit(bringer.put, what, 0, data)
        time.sleep(0.1)  # it waits for the fetch now; were it late, it would be kept all the same
        go_on.set()
        assert brought.result().status == 204
        assert asked.result()[0].status == 502
        assert asker.cached(what, (0, SMALL))[1] == data
