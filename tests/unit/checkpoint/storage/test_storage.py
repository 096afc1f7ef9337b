"""Both kinds of storage for checkpoints have the same guarantees."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import itertools
import os
import random
import resource
import tempfile
import threading
import weakref
from functools import partial
from unittest.mock import Mock

import pytest
from tests.support.forked import in_child

from millrace.checkpoint.codec.chunks import CHUNK_BYTES, OPAQUE, Kind
from millrace.checkpoint.format.tables import PACK_BELOW_BYTES, Packer
from millrace.checkpoint.storage import storage as storage_module
from millrace.checkpoint.storage.object_storage import ObjectStorage
from millrace.checkpoint.storage.storage import LocalStorage, open_storage
from millrace.errors import (
    ConfigurationError,
    DeniedError,
    DiskFullError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    UsageError,
)
from millrace.origin import Readable, open_origin
from millrace.runtime.pipeline import run_in_order

BLOCK = storage_module.BLOCK_BYTES


@pytest.fixture(params=["local", "local without sync", "object store"])
def storage(request, tmp_path):
    place = tmp_path / "run" / "step-1"
    if request.param == "object store":
        made = ObjectStorage(f"file://{place}", open_origin("file"), str(place))
    else:
        made = LocalStorage(str(place), sync=request.param == "local")
    made.prepare()
    return made


def test_written_file_is_read_back(storage):
    with storage.open_writer("data") as writer:
        for _ in range(5):
            writer.write(b"mill")
        writer.write(memoryview(b"race"))
        assert "data" not in storage.names()
    file = storage.stat("data")
    assert (file.name, file.size) == ("data", 24)
    assert bytes(storage.read(file, 18, 24)) == b"llrace"
    assert list(storage.names()) == ["data"]


def write(storage, pieces, name="data"):
    with storage.open_writer(name) as writer:
        for piece in pieces:
            writer.write(piece)


def test_aborted_file_is_removed(storage):
    def pieces():
        yield b"x" * 100
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write(storage, pieces())
    writer = storage.open_writer("data")
    writer.abort()
    writer.abort()
    assert list(storage.names()) == []


def test_publish_replaces_only_with_overwrite(storage):
    storage.publish("manifest", b"one", replace=False)
    with pytest.raises(ObjectExistsError):
        storage.publish("manifest", b"two", replace=False)
    assert bytes(storage.read(storage.stat("manifest"), 0, 3)) == b"one"
    storage.publish("manifest", b"three", replace=True)
    assert storage.stat("manifest").size == 5
    assert list(storage.names()) == ["manifest"]


def test_delete_twice_does_not_raise(storage):
    storage.publish("a", b"1", replace=True)
    storage.delete(["a", "b"])
    storage.delete(["a"])
    with pytest.raises(ObjectNotFoundError):
        storage.stat("a")
    assert list(storage.names()) == []


def test_sibling_storage_is_reachable(storage, tmp_path):
    sibling = tmp_path / "run" / "step-0"
    sibling.mkdir(parents=True)
    (sibling / "data").write_bytes(b"older")
    file = storage.stat("../step-0/data")
    assert bytes(storage.read(file, 1, 4)) == b"lde"


def test_open_storage_chooses_by_url(tmp_path):
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)
    assert isinstance(open_storage("s3://bucket/run/", {"endpoint_url": "http://127.0.0.1:1"}), ObjectStorage)
    assert isinstance(open_storage(tmp_path, origin=open_origin("file")), ObjectStorage)
    for wrong in ("", "s3://", "nope://bucket/x"):
        with pytest.raises(ConfigurationError):
            open_storage(wrong)
    with pytest.raises(ConfigurationError):
        open_storage(tmp_path, {"key": "x"})


class ReadOnly:
    """An origin that can only be read, as a cache is."""

    def __init__(self):
        self._origin = open_origin("file")
        self.identity, self.head_is_local = "read-only", True
        self.head, self.read = self._origin.head, self._origin.read
        self.is_immutable = self._origin.is_immutable


def test_storage_over_readable_origin_reads(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    origin = ReadOnly()
    assert isinstance(origin, Readable)
    storage = open_storage(tmp_path, origin=origin)
    assert bytes(storage.read(storage.stat("x"), 0, 3)) == b"abc"
    for act in (storage.prepare, storage.names, lambda: storage.open_writer("y"), lambda: storage.delete(["x"])):
        with pytest.raises(ConfigurationError, match="only be read"):
            act()


def test_system_errors_are_translated(tmp_path, monkeypatch):
    storage = LocalStorage(str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_bytes(b"")
    for place in (storage.url, os.path.dirname(storage.url)):
        with pytest.raises(
            StorageError, match=f"the directory {place} cannot be created .Not a directory.: choose a dir"
        ):
            LocalStorage(place).prepare()
    assert list(storage.names()) == []
    # `mkdir` in /proc fails as if a parent were missing.
    for number, kind in ((errno.ENOENT, StorageError), (errno.EACCES, DeniedError), (errno.ENOSPC, DiskFullError)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "makedirs", Mock(side_effect=OSError(number, os.strerror(number))))
            with pytest.raises(kind) as raised:
                storage.prepare()
        assert kind is DiskFullError or "cannot be created" in str(raised.value)
    with pytest.raises(
        ObjectNotFoundError, match=r"gone/x cannot be created \(No such file or directory\): check that"
    ):
        LocalStorage(str(tmp_path / "gone")).publish("x", b"1", replace=True)
    storage = LocalStorage(str(tmp_path))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(DeniedError):
        storage.publish("x", b"1", replace=True)
    assert list(storage.names()) == ["file"]


@pytest.mark.parametrize("limit", [1 << 20, BLOCK + (1 << 20)])
def test_full_disk_raises_disk_full_error(tmp_path, limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    storage = LocalStorage(str(tmp_path))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(DiskFullError):
            write(storage, [bytes(200_000)] * 50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(storage.names()) == []


# --- writes to the disk in blocks -----------------------------------------------------------------


def is_on_block_device(storage):
    return os.major(os.stat(storage.url).st_dev) != 0


@pytest.fixture(params=["direct", "without the flag", "with the flag only", "tmpfs"])
def disk(request, tmp_path, monkeypatch):
    """A storage on a file system with direct writes, on one that refuses the flag, and on one that refuses the writes."""
    set_flags, pwrite = fcntl.fcntl, os.pwrite

    def refuse_flag(descriptor, command, value=0):
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(descriptor, command, value)

    def refuse_write(descriptor, data, position):
        if set_flags(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data, position)

    if request.param == "without the flag":
        monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
    elif request.param == "with the flag only":
        monkeypatch.setattr(os, "pwrite", refuse_write)
    elif request.param == "tmpfs":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield LocalStorage(folder)
        return
    yield LocalStorage(str(tmp_path))


@pytest.mark.parametrize(
    "nbytes", [1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 4096, 3 * BLOCK + 5000, 9 * BLOCK, 9 * BLOCK + 8192]
)
def test_file_of_any_size_has_the_bytes_written(disk, nbytes, request):
    rng = random.Random(nbytes)
    data = memoryview(rng.randbytes(nbytes))
    with disk.open_writer("file") as writer:
        position = 0
        while position < nbytes:
            count = rng.choice([1, 4095, 1 << 20, BLOCK, 2 * BLOCK])
            writer.write(data[position : position + count])
            position += count
    file = disk.stat("file")
    assert file.size == nbytes
    assert disk.read(file, 0, nbytes) == data
    written, seconds = writer.written
    # The rest is written, or synced, at the end.
    is_direct = is_on_block_device(disk) and "direct" in request.node.callspec.id
    most_left = 32 << 20 if not is_direct else BLOCK if nbytes < BLOCK else 4096
    assert max(0, nbytes - most_left) <= written <= nbytes
    assert (seconds > 0) == (written > 0)
    assert list(disk.names()) == ["file"]


def test_bytes_in_the_page_cache_do_not_count_as_written(disk, monkeypatch):
    directly, synced = [], []
    pwrite, fdatasync = os.pwrite, os.fdatasync

    def write_down(descriptor, data, position):
        count = pwrite(descriptor, data, position)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            directly.append(position + count)
        return count

    def sync(descriptor):
        synced.append(os.fstat(descriptor).st_size)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "pwrite", write_down)
    monkeypatch.setattr(os, "fdatasync", sync)
    with disk.open_writer("file") as writer:
        for _ in range(20):
            writer.write(bytes(BLOCK))
    assert 0 < writer.written[0] <= max([*directly, *synced], default=0)


def test_large_file_is_not_in_the_page_cache(tmp_path):
    storage = LocalStorage(str(tmp_path))
    write(storage, [bytes(BLOCK)] * 3)
    if not is_on_block_device(storage):
        pytest.skip("the file system of the tests has no block device")
    with (tmp_path / "data").open("rb") as file, pytest.raises(BlockingIOError):
        os.preadv(file.fileno(), [bytearray(4096)], BLOCK, os.RWF_NOWAIT)


def test_error_of_an_earlier_block_is_raised(disk, monkeypatch):
    written, pwrite = [], os.pwrite

    def broken(descriptor, data, position):
        written.append(position)
        if position >= 2 * BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        write(disk, [bytes(BLOCK)] * 40, name="file")
    assert max(written) < 10 * BLOCK  # no later block was begun in vain
    assert list(disk.names()) == []


def test_error_of_a_sync_is_raised_without_a_block_device(tmp_path, monkeypatch):
    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "major", lambda _: 0)
    monkeypatch.setattr(os, "fdatasync", broken)
    storage = LocalStorage(str(tmp_path))
    with pytest.raises(StorageError, match="Input/output error"):
        write(storage, [bytes(BLOCK)] * 40)
    assert list(storage.names()) == []


def failing_once(function, error, at):
    """The function, which raises the error in its call number `at`."""
    calls = itertools.count(1)

    def call(*arguments):
        if next(calls) == at:
            raise error
        return function(*arguments)

    return call


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_writer_whose_caller_continues_after_an_error_publishes_no_file(disk, error, monkeypatch):
    writer = disk.open_writer("file")
    monkeypatch.setattr(os, "pwrite", failing_once(os.pwrite, error, 2))
    expected = StorageError if isinstance(error, OSError) else KeyboardInterrupt
    raised = 0
    for _ in range(10):
        try:
            writer.write(bytes(BLOCK))
        except expected:
            raised += 1
    assert raised > 1
    with pytest.raises(expected):
        writer.close()
    with pytest.raises(expected):
        writer.close()
    assert os.listdir(disk.url) == []


def test_writer_whose_close_failed_raises_the_error_again(disk, monkeypatch):
    writer = disk.open_writer("file")
    writer.write(bytes(BLOCK + 1))
    monkeypatch.setattr(os, "fsync", failing_once(os.fsync, OSError(errno.EIO, "Input/output error"), 1))
    for _ in range(2):
        with pytest.raises(StorageError, match="Input/output error"):
            writer.close()
    assert os.listdir(disk.url) == []


@pytest.mark.parametrize("end", ["close", "abort"])
def test_write_to_a_closed_writer_is_refused_and_changes_no_other_file(disk, end):
    writer = disk.open_writer("file")
    writer.write(b"complete")
    getattr(writer, end)()
    with open(os.path.join(disk.url, "other"), "wb", buffering=0) as other:  # with the same descriptor
        other.write(b"other")
        with pytest.raises(UsageError, match="is closed"):
            writer.write(b"late")
    with open(other.name, "rb") as found:
        assert found.read() == b"other"


def test_writer_of_a_parent_is_refused_in_a_forked_child(disk):
    """The child waited without end for the parent's thread, and its `abort` removed the parent's file."""

    def child() -> str:
        raised = []
        for call in (partial(writer.write, bytes(BLOCK)), writer.close):
            with pytest.raises(UsageError) as error:
                call()
            raised.append(str(error.value))
        with contextlib.suppress(KeyError), writer:
            raise KeyError
        return "\n".join(raised)

    with disk.open_writer("file") as writer:
        writer.write(bytes(2 * BLOCK))
        assert in_child(child).count("was opened before a fork: open it in the process that writes") == 2
        writer.write(b"end")
    with open(os.path.join(disk.url, "file"), "rb") as found:
        assert found.read() == bytes(2 * BLOCK) + b"end"


def test_interrupt_of_an_abort_leaves_no_file(disk, monkeypatch):
    before = threading.active_count()
    writer = disk.open_writer("file")
    for _ in range(3):
        writer.write(bytes(BLOCK))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", failing_once(threading.Thread.join, KeyboardInterrupt(), 1))
        with contextlib.suppress(KeyboardInterrupt):  # there may be no thread
            writer.abort()
    assert os.listdir(disk.url) == []
    writer.abort()
    assert writer._file.closed
    assert threading.active_count() == before


def test_interrupt_of_a_failed_close_leaves_no_file_and_no_thread(disk, monkeypatch):
    before = threading.active_count()
    monkeypatch.setattr(os, "fsync", failing_once(os.fsync, OSError(errno.EIO, "Input/output error"), 1))
    stop = failing_once(storage_module._DiskWriter.stop, KeyboardInterrupt(), 1)
    monkeypatch.setattr(storage_module._DiskWriter, "stop", stop)
    with pytest.raises(KeyboardInterrupt):
        write(disk, [bytes(BLOCK)] * 3)
    assert os.listdir(disk.url) == []
    assert threading.active_count() == before


def test_abort_after_an_error_of_a_block_keeps_no_memory(tmp_path, monkeypatch):
    blocks, failed = [], threading.Event()

    def broken(_, data, __):
        blocks.append(weakref.ref(data.obj.base))
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    monkeypatch.setattr(os, "major", lambda _: 1)
    gc.disable()
    try:
        writer = LocalStorage(str(tmp_path)).open_writer("file")
        writer.write(bytes(BLOCK))
        assert failed.wait(60)
        writer.abort()
        assert [block() for block in blocks] == [None] * len(blocks)
    finally:
        gc.enable()


def test_abort_with_blocks_in_flight_leaves_no_file_and_no_thread(disk):
    before = threading.active_count()
    writer = disk.open_writer("file")
    for _ in range(6):
        writer.write(bytes(BLOCK))
    writer.abort()
    writer.abort()
    assert list(disk.names()) == []
    assert threading.active_count() == before


# --- what goes into which chunk, and in which order -----------------------------------------------


def chunks(*items):
    packer = Packer()
    made = [chunk for number, (nbytes, kind) in enumerate(items) for chunk in packer.add(number, nbytes, kind)]
    return [[(part.item, part.start, part.stop) for part in chunk.parts] for chunk in [*made, *packer.flush()]]


def test_large_items_are_cut_and_small_ones_packed():
    fp32 = Kind(4, True)
    assert chunks((CHUNK_BYTES + 4, fp32)) == [[(0, 0, CHUNK_BYTES)], [(0, CHUNK_BYTES, CHUNK_BYTES + 4)]]
    assert chunks((8, fp32), (0, fp32), (4, fp32)) == [[(0, 0, 8), (2, 0, 4)]]
    assert chunks((8, fp32), (8, OPAQUE), (8, fp32)) == [[(0, 0, 8), (2, 0, 8)], [(1, 0, 8)]]
    assert chunks((8, fp32), (PACK_BELOW_BYTES, fp32)) == [[(1, 0, PACK_BELOW_BYTES)], [(0, 0, 8)]]
    many = chunks(*[(PACK_BELOW_BYTES - 4, fp32)] * 20)
    assert [len(chunk) for chunk in many] == [8, 8, 4]


def test_storage_work_is_ordered_and_bounded():
    begun: list[int] = []

    def jobs():
        for number in range(100):
            begun.append(number)
            yield number

    for done, result in enumerate(run_in_order(jobs(), lambda number: number * 2, threads=3)):
        assert result == 2 * done
        assert len(begun) - done <= 2 * 3 + 2
    assert len(begun) == 100


def test_storage_work_after_an_error_ends():
    def work(number):
        if number == 5:
            raise KeyError(number)
        return number

    seen = []
    with pytest.raises(KeyError):
        seen.extend(run_in_order(range(1000), work, threads=2))
    assert seen == [0, 1, 2, 3, 4]


def test_publish_of_the_same_bytes_on_a_full_disk_is_a_full_disk(tmp_path, monkeypatch):
    """The file is the one of before: nothing was published, whatever it contains."""
    storage = LocalStorage(str(tmp_path))
    storage.publish("claim", b"one", replace=True)

    def full(*_):
        raise DiskFullError("full", next_step="free space")

    monkeypatch.setattr(storage_module.LocalWriter, "write", full)
    with pytest.raises(DiskFullError):
        storage.publish("claim", b"one", replace=True)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_publish_without_hard_links_has_one_winner(tmp_path, monkeypatch, number):
    def no_links(source, target):
        raise OSError(number, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    storage = LocalStorage(str(tmp_path))
    storage.publish("manifest", b"one", replace=False)
    with pytest.raises(ObjectExistsError):
        storage.publish("manifest", b"two", replace=False)
    assert (tmp_path / "manifest").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["manifest"]
    with pytest.raises(StorageError):
        LocalStorage(str(tmp_path)).publish("x" * 250, b"", replace=False)


def test_new_directories_are_synced(tmp_path, monkeypatch):
    synced = []
    sync_directory = storage_module._sync_directory
    monkeypatch.setattr(storage_module, "_sync_directory", lambda path: (synced.append(path), sync_directory(path)))
    place = tmp_path / "run" / "step-1"
    LocalStorage(str(place), sync=False).prepare()
    assert synced == []
    LocalStorage(str(tmp_path / "other" / "step-1")).prepare()
    assert set(synced) == {str(tmp_path), str(tmp_path / "other")}
    synced.clear()
    LocalStorage(str(tmp_path / "other" / "step-1")).prepare()
    assert synced == []
