"""Origins over fsspec's libraries: descriptions of files, concurrent use, errors, and secrets."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import pickle
import re
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import fsspec
import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from tests.support.interrupts import interrupted_at
from tests.support.waiting import in_other_thread

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.fsspec_origin import FsspecOrigin, uploads
from millrace.origin.fsspec_origin.naming import (
    PART_PREFIX,
    identity_of,
    is_in_memory,
    is_local,
    needs_secret_for_identity,
)
from millrace.origin.fsspec_origin.translation import describe, seconds, translate, translated
from millrace.origin.upload import PART_BYTES

SECRET = "planted @/é+'\\ Secret"
"""Looks different in each form."""


def over(directory: Path) -> FsspecOrigin:
    return FsspecOrigin("dir", {"path": str(directory), "target_protocol": "file"})


# --- names --------------------------------------------------------------------------------------


def test_identity_contains_location_and_no_secret() -> None:
    options = {"host": "h", "port": 22, "username": "u", "password": "hunter22", "pkey": "PEM", "timeout": 3}
    assert identity_of("sftp", options) == "fsspec-sftp+host=h+port=22+username=u"
    nested = {"target_protocol": "ftp", "target_options": {"host": "h", "password": "hunter22"}, "fo": "a/b.zip"}
    assert identity_of("zip", nested) == "fsspec-zip+fo=a/b.zip+target_options.host=h+target_protocol=ftp"


def test_identities_differ_by_unknown_options() -> None:
    same = {"host": "h", "password": "one"}
    assert identity_of("sftp", same) == identity_of("sftp", {**same, "password": "two", "block_size": 1})
    for other in (
        {"host": "i"},
        {"host": "h", "port": 1},
        {"host": "h", "drive": "team"},
        {"host": "h", "drive": "other"},
    ):
        assert identity_of("sftp", other) != identity_of("sftp", same)
    odd = identity_of("x", {"drive": "https://user:hunter22@h", "endpoint": "https://user:hunter22@h"})
    assert "hunter22" not in odd


def test_memory_is_another_storage_in_every_process() -> None:
    origin = FsspecOrigin("memory")
    here = origin.identity
    assert here == FsspecOrigin("memory").identity
    inside = FsspecOrigin("dir", {"path": "/x", "target_protocol": "memory"})
    assert inside.identity.rpartition("+")[2] == here.rpartition("+")[2]
    assert is_in_memory("zip", {"fo": "memory://a.zip"})
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, origin.identity.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with open(read, "rb") as answer:
        there = answer.read().decode()
    # A time of its own as well, since the number may be that of a process that has ended.
    (number, began), (other, later) = (re.findall(r"process=(\d+)\.(\d+)$", name)[0] for name in (here, there))
    assert number != other
    assert int(began) < int(later)


@pytest.mark.parametrize(
    ("scheme", "options", "expected"),
    [
        ("dropbox", {"token": "t"}, True),
        ("gdrive", {"creds": {"private_key": "k"}}, True),
        ("gdrive", {"creds": {"private_key": "k"}, "root_file_id": "folder"}, False),
        ("gdrive", {"token": None}, False),
        ("webdav", {"base_url": "https://h/webdav", "auth": ("user", "hunter22")}, True),
        ("webdav", {"base_url": "https://h/webdav"}, False),
        ("sftp", {"host": "h", "password": "hunter22"}, False),
        ("zip", {"fo": "dropbox://a.zip", "target_options": {"token": "t"}}, True),
        ("zip", {"fo": "b/a.zip", "target_protocol": "s3", "target_options": {"key": "k", "secret": "s"}}, False),
        ("dir", {"path": "x", "target_protocol": "dropbox", "target_options": {"token": "t"}}, True),
    ],
)
def test_origins_distinguished_only_by_secret_share_nothing(
    scheme: str, options: dict[str, Any], expected: bool
) -> None:
    assert needs_secret_for_identity(scheme, options) is expected


class Account(LocalFileSystem):  # type: ignore[misc]
    """A service that only its token identifies; here it is a directory of this machine."""

    protocol = "account"

    def __init__(self, token: str | None = None, **options: Any) -> None:
        super().__init__(**options)


def test_secret_only_origin_is_shared_with_its_copies_only() -> None:
    fsspec.register_implementation("account", Account, clobber=True)
    one, other = (FsspecOrigin("account", {"token": token}) for token in ("hunter22", "hunter23"))
    assert one.identity != other.identity
    assert one.identity == pickle.loads(pickle.dumps(one)).identity
    assert "hunter22" not in one.identity
    assert FsspecOrigin("account").identity == FsspecOrigin("account").identity


@pytest.mark.parametrize(
    ("scheme", "options", "expected"),
    [
        ("memory", {}, True),
        ("sftp", {"host": "h"}, False),
        ("zip", {"fo": "/tmp/a.zip"}, True),
        ("zip", {"fo": "s3://b/a.zip"}, False),
        ("zip", {"fo": "b/a.zip", "target_protocol": "s3"}, False),
        ("dir", {"path": "/x", "target_protocol": "file"}, True),
        ("dir", {"path": "x", "target_protocol": "zip", "target_options": {"fo": "ftp://h/x"}}, False),
    ],
)
def test_local_fsspec_origin_is_not_read_from_peers(scheme: str, options: dict[str, Any], expected: bool) -> None:
    assert is_local(scheme, options) is expected


# --- descriptions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "version"),
    [
        ({"size": 3, "ETag": '"abc"', "mtime": 5.0}, 'ETag="abc"'),
        ({"size": 3, "version_id": "7", "checksum": "x"}, "version_id=7"),
        ({"size": 3, "md5Checksum": "d"}, "md5Checksum=d"),
        ({"size": 3, "mtime": 5.25, "ino": 9}, "~3-5.25-9"),
        ({"size": 3, "mtime": datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)}, "~3-5.0"),
        ({"size": 3, "ETag": None, "etag": ""}, "~3-0.0"),
    ],
)
def test_version_is_the_most_exact_field_of_the_library(info: dict[str, Any], version: str) -> None:
    assert describe("k", info, "x://k").version == version


def test_times_are_read_as_libraries_write_them() -> None:
    wanted = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    for value in (
        wanted,
        wanted.replace(tzinfo=None),
        wanted.timestamp(),
        wanted.timestamp() * 1000,
        (2026, 3, 4, 5, 6, 7),
        "2026-03-04T05:06:07+00:00",
        "20260304050607",
    ):
        assert seconds(value) == wanted.timestamp(), value
    assert seconds("yesterday") == seconds(None) == 0.0


def test_file_without_size_raises() -> None:
    with pytest.raises(UsageError, match="no known size"):
        describe("k", {"size": None, "type": "file"}, "x://k")


# --- one at a time ------------------------------------------------------------------------------


class OneConnection(LocalFileSystem):  # type: ignore[misc]
    """Files, through a client that breaks when two threads use it at once, as clients with one connection do."""

    protocol = "one-connection"
    made: list[OneConnection] = []  # noqa: RUF012 - fsspec's own style, read by the tests
    gate: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.busy = threading.Lock()
        self.broken = False
        type(self).made.append(self)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        assert self.busy.acquire(blocking=False), "two threads at once"
        try:
            if self.broken:
                raise EOFError("the connection is gone")
            type(self).gate()
            return bytes(super().cat_file(path, start, end, **options))
        finally:
            self.busy.release()


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[FsspecOrigin]:
    fsspec.register_implementation("one-connection", OneConnection)
    # Only its base class is known to be safe, not this library.
    clients = import_module("millrace.origin.fsspec_origin.clients")
    monkeypatch.setattr(clients, "_SHARED", ())
    OneConnection.made = []
    yield FsspecOrigin("one-connection")
    OneConnection.gate = staticmethod(lambda: None)
    import_module("fsspec.registry")._registry.pop("one-connection")


def test_clients_are_used_by_one_thread_and_reused(one_connection: FsspecOrigin, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    key = str(tmp_path / "x")
    together = threading.Barrier(8)
    OneConnection.gate = staticmethod(lambda: together.wait(120) and None)  # so that eight are in use at once
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda number: bytes(one_connection.read(key, number % 5, 6)), range(64)))
    assert answers == [b"0123456789"[number % 5 : 6] for number in range(64)]
    assert len(OneConnection.made) == 8


def test_clients_inside_wrapping_clients_are_not_shared(one_connection: FsspecOrigin, tmp_path: Path) -> None:
    origin = FsspecOrigin("dir", {"path": str(tmp_path), "target_protocol": "one-connection"})
    with origin._clients.lend() as one, origin._clients.lend() as other:
        assert one.fs is not other.fs  # fsspec would give one to all that a thread makes


def test_client_with_broken_connection_is_not_reused(one_connection: FsspecOrigin, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    key = str(tmp_path / "x")
    assert bytes(one_connection.read(key, 0, 2)) == b"01"
    OneConnection.made[0].broken = True
    with pytest.raises(OriginUnavailableError):
        one_connection.read(key, 0, 2)
    assert bytes(one_connection.read(key, 0, 2)) == b"01"
    with pytest.raises(ObjectNotFoundError):
        one_connection.head(f"{key}-none")
    assert len(OneConnection.made) == 2


def test_interrupt_at_any_moment_of_a_request_leaves_the_clients_usable(one_connection: FsspecOrigin) -> None:
    clients = one_connection._clients

    def request(at_once: int = 1) -> None:
        with contextlib.ExitStack() as lent:
            for _ in range(at_once):
                lent.enter_context(clients.lend())

    for number in itertools.count():
        is_last = interrupted_at(number, request) is None
        gc.collect()  # the frames of the interrupted functions
        in_other_thread(lambda: request(8))
        if is_last:
            break
    assert number > 10


def test_open_writer_does_not_block_other_requests(one_connection: FsspecOrigin, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    writers = [one_connection.open_writer(str(tmp_path / f"w{number}")) for number in range(10)]
    for writer in writers:
        writer.write(bytes(17 << 20))  # more than one part: each has a client now
    assert bytes(one_connection.read(str(tmp_path / "x"), 0, 2)) == b"01"
    for number, writer in enumerate(writers):
        writer.abort() if number else writer.close()
    assert sorted(os.listdir(tmp_path)) == ["w0", "x"]


def test_upload_of_a_whole_file_has_no_file_that_a_kill_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Whole(AbstractFileSystem):  # type: ignore[misc]
        """Accepts an object whole, as most object stores."""

        def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
            assert os.listdir(tmp_path) == []
            received.append(Path(lpath).read_bytes())

    received: list[bytes] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uploads.write(Whole(), "x", iter([b"first", b"second"]))
    assert received == [b"firstsecond"]


def test_upload_that_fails_in_the_middle_publishes_nothing() -> None:
    class File(AbstractBufferedFile):  # type: ignore[misc]
        def _upload_chunk(self, final: bool = False) -> None:
            if failures and self.offset:
                raise failures.pop()
            parts.append(self.buffer.getvalue())
            if final:
                published.append(b"".join(parts))

    class InParts(AbstractFileSystem):  # type: ignore[misc]
        def _open(self, path: str, mode: str = "rb", **options: Any) -> File:
            return File(self, path, mode, block_size=4)

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            pass

    failures: list[Exception] = [ConnectionResetError()]
    parts: list[bytes] = []
    published: list[bytes] = []
    data = [b"x" * PART_BYTES, b"y" * PART_BYTES, b"z"]
    with pytest.raises(ConnectionResetError):
        uploads.write(InParts(), "x", iter(data))
    assert published == []
    parts.clear()
    uploads.write(InParts(), "x", iter(data))
    assert published == [b"".join(data)]


# --- reading ------------------------------------------------------------------------------------


def test_read_of_changing_file_raises_object_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = over(tmp_path)
    origin.put("x", b"first")
    info = origin.head("x")
    cat = LocalFileSystem.cat_file

    def overtaken(self: Any, path: str, *args: Any, **options: Any) -> Any:
        data = cat(self, path, *args, **options)
        (tmp_path / "new").write_bytes(b"other")
        os.replace(tmp_path / "new", tmp_path / "x")
        return data

    monkeypatch.setattr(LocalFileSystem, "cat_file", overtaken)
    with pytest.raises(ObjectChangedError):
        origin.read("x", 0, 5, version=info.version)


def test_missing_directory_is_empty_whatever_the_class_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = over(tmp_path)

    def missing(*_: Any, **__: Any) -> None:
        raise NumberedError(errno.ENOENT)

    monkeypatch.setattr(LocalFileSystem, "ls", missing)
    assert origin.list_level("none").objects == ()


def test_archive_in_another_storage_is_read_only(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("data/one", "data/two/three", "top"):
            archive.writestr(name, name * 3)
    origin = FsspecOrigin("zip", {"fo": str(tmp_path / "a.zip")})
    assert [info.key for page in origin.list_all("") for info in page] == ["data/one", "data/two/three", "top"]
    info = origin.head("data/two/three")
    assert info.version.startswith("CRC=")
    assert bytes(origin.read(info.key, 4, 14, version=info.version)) == b"/two/three"
    for write in (lambda: origin.put("x", b""), lambda: origin.open_writer("x"), lambda: origin.delete(["top"])):
        with pytest.raises(UsageError, match="is read only"):
            write()


# --- writing ------------------------------------------------------------------------------------


def test_file_in_progress_is_not_listed(tmp_path: Path) -> None:
    origin = over(tmp_path)
    origin.put("d/there", b"x")
    writer = origin.open_writer("d/coming")
    writer.write(bytes(40 << 20))
    end = time.monotonic() + 120
    while not [name for name in os.listdir(tmp_path / "d") if name.startswith(PART_PREFIX)]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [info.key for info in origin.list_level("d").objects] == ["d/there"]
    writer.close()
    assert sorted(info.key for info in origin.list_level("d").objects) == ["d/coming", "d/there"]
    assert not [name for name in os.listdir(tmp_path / "d") if name.startswith(PART_PREFIX)]


def test_write_of_file_over_directory_raises(tmp_path: Path) -> None:
    origin = over(tmp_path)
    origin.put("d/x", b"1")
    with pytest.raises(MillraceError):
        origin.put("d", b"2")
    assert bytes(origin.read("d/x", 0, 1)) == b"1"
    assert os.listdir(tmp_path) == ["d"]


def test_delete_of_a_directory_removes_it_only_if_empty(tmp_path: Path) -> None:
    origin = over(tmp_path)
    origin.put("d/e/x", b"1")
    origin.delete(["d/e", "d", "none"])
    assert bytes(origin.read("d/e/x", 0, 1)) == b"1"
    origin.delete(["d/e/x", "d/e", "d"])
    assert os.listdir(tmp_path) == []


def test_conditional_put_without_library_support_raises() -> None:
    class Plain(AbstractFileSystem):  # type: ignore[misc]
        """A write that would replace an object created by another process in the meantime."""

    with pytest.raises(UsageError, match="only if it is absent"):
        uploads.create(Plain(), "x", b"1", "plain://x")


def test_conditional_put_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of a checkpoint is written in this way: its first part would be a checkpoint that cannot be read."""
    origin = over(tmp_path)

    def fill_the_disk(self: Any, data: bytes) -> int:
        self.f.write(data[:3])
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as full:
        full.setattr(LocalFileOpener, "write", fill_the_disk)
        with pytest.raises(MillraceError, match="no space left"):
            origin.put("manifest", b"12345", if_absent=True)
    assert os.listdir(tmp_path) == []
    origin.put("manifest", b"12345", if_absent=True)
    with pytest.raises(ObjectExistsError):
        origin.put("manifest", b"other", if_absent=True)
    assert (tmp_path / "manifest").read_bytes() == b"12345"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("library", ["smb", "dbfs"])
def test_overwrite_where_a_rename_replaces_no_file_keeps_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, library: str
) -> None:
    """The errors of smb have the numbers of Python's classes, and a class of its own; those of DBFS have no number."""
    origin = over(tmp_path)
    origin.put("x", b"old")
    renames: list[str] = []

    def rename(self: Any, source: str, target: str, **_: Any) -> None:
        renames.append(source)
        if os.path.exists(target):
            raise NumberedError(errno.EEXIST) if library == "smb" else FileExistsError("it exists")
        if fails and len(renames) == 3:
            raise ConnectionResetError("lost")
        os.rename(source, target)

    monkeypatch.setattr(LocalFileSystem, "mv", rename)
    if fails:
        with pytest.raises(OriginUnavailableError):
            origin.put("x", b"newer")
    else:
        origin.put("x", b"newer")
    assert (tmp_path / "x").read_bytes() == (b"old" if fails else b"newer")
    assert os.listdir(tmp_path) == ["x"]


# --- errors -------------------------------------------------------------------------------------


class ConnectorError(OSError):
    """As aiohttp's error for a connection."""


class NumberedError(OSError):
    """As smbprotocol's error, which is of none of Python's classes for numbers."""

    __module__ = "smbprotocol.exceptions"

    def __init__(self, number: int) -> None:
        super().__init__(number, os.strerror(number))


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status} for password=hunter22\nsecond line")
        self.status = status


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("x"), ObjectNotFoundError),
        (NumberedError(errno.ENOENT), ObjectNotFoundError),
        (NumberedError(errno.EEXIST), ObjectExistsError),
        (NumberedError(errno.EACCES), DeniedError),
        (ConnectorError(errno.EACCES, "refused by a firewall"), OriginUnavailableError),
        (PermissionError("x"), DeniedError),
        (FileExistsError("x"), ObjectExistsError),
        (IsADirectoryError("x"), UsageError),
        (NotImplementedError(), UsageError),
        (OSError(22, "bad range"), UsageError),
        (OSError(36, "name too long"), UsageError),
        (KeyError("x"), UsageError),
        (ConnectionResetError("x"), OriginUnavailableError),
        (TimeoutError("x"), OriginUnavailableError),
        (EOFError(), OriginUnavailableError),
        (StatusError(404), ObjectNotFoundError),
        (StatusError(401), DeniedError),
        (StatusError(403), DeniedError),
        (StatusError(400), UsageError),
        (StatusError(429), OriginBusyError),
        (StatusError(503), OriginBusyError),
        (StatusError(500), OriginUnavailableError),
    ],
)
def test_library_errors_are_translated_without_option_values(error: Exception, expected: type[MillraceError]) -> None:
    ours = translate(error, "x://k", {"password": "hunter22", "nested": {"token": "hunter22"}})
    assert type(ours) is expected or (expected is UsageError and isinstance(ours, UsageError))
    assert "hunter22" not in str(ours)
    assert "\n" not in str(ours)
    assert isinstance(ours, OriginBusyError) == (expected is OriginBusyError)


@pytest.mark.parametrize(
    "options",
    [
        {"password": SECRET},
        {"auth": ("user", SECRET)},
        {"auth": ["user", SECRET]},
        {"auth": SECRET.encode()},
        {"client_kwargs": {"servers": [{"path": SECRET}], "logins": frozenset([SECRET])}},
        {"auth": {"path": SECRET}},
        {"pkey": f"-----BEGIN KEY-----\n{SECRET}\n"},
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"https://u:{quote(SECRET)}@h/",
        f"https://u:{quote(SECRET, safe='')}@h/",
        f"https://u:{quote(SECRET, safe='').lower()}@h/",
        f"password={quote_plus(SECRET)}",
        f"failed with {('user', SECRET)!r}",
        f"failed with {SECRET.encode()!r}",
    ],
)
def test_no_encoding_of_an_option_value_is_shown(options: dict[str, Any], text: str) -> None:
    for cause in (ValueError(text), ValueError("bad", text), _caused(text)):
        with pytest.raises(MillraceError) as caught, translated("x://k", options):
            raise cause
        printed = "".join(traceback.format_exception(caught.value))
        for form in (SECRET, quote(SECRET), quote(SECRET, safe=""), quote_plus(SECRET), repr(SECRET)[1:-1]):
            assert form.lower() not in printed.lower()
        assert type(cause).__name__ in str(caught.value)


def _caused(text: str) -> Exception:
    error = RuntimeError("harmless")
    error.__cause__ = ValueError(text)
    return error


def test_identity_text_in_a_message_is_not_hidden() -> None:
    """Otherwise errors would name no cause: `target_protocol` is "file", and most messages contain a host."""
    given = {"host": "storage.example.com", "target_protocol": "file", "password": SECRET}
    ours = translate(OSError("no file at storage.example.com"), "x://k", given)
    assert "no file at storage.example.com" in str(ours)


def test_only_the_pickle_contains_the_options(tmp_path: Path) -> None:
    origin = FsspecOrigin("ftp", {"host": "127.0.0.1", "username": "u", "password": "hunter22"})
    assert "hunter22" not in repr(origin) + origin.identity
    copy = pickle.loads(pickle.dumps(origin))
    assert copy.identity == origin.identity
    assert copy._target_options["password"] == "hunter22"


def test_protocol_unknown_to_fsspec_raises() -> None:
    with pytest.raises(ConfigurationError, match="fsspec has no protocol"):
        FsspecOrigin("no-such-protocol")
