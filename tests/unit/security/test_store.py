"""The cache on a shared machine: modes, planted links, and files of other users."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import millrace
from millrace.cache.node import close_nodes
from millrace.cluster.attach import close_all
from millrace.cluster.folder import NodeFolder
from millrace.config import resolve
from millrace.errors import StorageError
from millrace.events import Event
from millrace.runtime.private_files import make_folder

DATA = {"small": b"s" * 1000, "large": os.urandom(9 << 20)}  # one is in a segment, one has its own file


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in DATA.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def read(tmp_path: Path, data: Path) -> Callable[[], None]:
    """Opens the cache again, as another process would, and reads everything through it."""

    def through_the_cache() -> None:
        close_all()
        close_nodes()
        fs = millrace.filesystem("file", cache_dir=str(tmp_path / "c" / "d"), min_free=0)
        for name, content in DATA.items():
            assert fs.cat_file(str(data / name)) == content

    return through_the_cache


@pytest.fixture
def store(tmp_path: Path, read: Callable[[], None]) -> Path:
    """A store with something in it."""
    read()
    close_all()
    close_nodes()
    return tmp_path / "c" / "d" / "millrace" / "local"


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(below: Path) -> dict[str, int]:
    """The mode of everything below a folder, by its path."""
    found = {}
    for path in below.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # an open cache has removed it meanwhile
            found[str(path.relative_to(below))] = stat.S_IMODE(path.lstat().st_mode)
    return found


def wrong_modes(below: Path) -> dict[str, str]:
    """The files with permissions for other users."""
    return {path: f"{mode:o}" for path, mode in modes(below).items() if mode & 0o077}


def test_store_files_are_private_with_any_umask(
    tmp_path: Path, no_umask: None, read: Callable[[], None], data: Path
) -> None:
    read()
    folder = NodeFolder.claim(resolve({"cache_dir": str(tmp_path / "c" / "d")}), tag="here")
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "c" / "d"), min_free=0)
    fs.pin(str(data))  # its file of rules
    pid = os.fork()
    if pid == 0:  # a child opens the index by a name of its own
        try:
            read()
        except BaseException:  # noqa: BLE001 - any failure is the status
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    folder.close()
    close_nodes()
    read()  # folds the counters of those that have ended
    found = modes(tmp_path / "c")
    assert {"d", "d/millrace", "d/millrace/local/index", "d/millrace/local.node/id"} <= set(found)
    assert any(name.startswith("d/millrace/local/index/fork") for name in found)
    assert any(name.startswith("d/millrace/local/counters/retired") for name in found)
    assert any(name.endswith("rules.json") for name in found)
    assert wrong_modes(tmp_path / "c") == {}


def test_open_directory_is_closed_and_reported(store: Path, read: Callable[[], None], events: list[Event]) -> None:
    store.chmod(0o755)
    store.parent.chmod(0o777)
    read()
    assert stat.S_IMODE(store.stat().st_mode) == stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    reported = {event.subject: event.detail for event in events if event.name == "cache.folder.closed"}
    assert set(reported) == {str(store), str(store.parent)}
    assert "0755" in reported[str(store)]


def test_group_writable_store_is_kept(store: Path, read: Callable[[], None], events: list[Event]) -> None:
    """Kubernetes gives a volume to a group at each start of a pod: that must not cost the cache."""
    for path in (store, *store.rglob("*")):
        path.chmod(path.stat().st_mode | 0o060)
    read()
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert "cache.store.discarded" not in {event.name for event in events}


def test_world_writable_store_is_discarded(store: Path, read: Callable[[], None], events: list[Event]) -> None:
    """Another user may have stored other bytes there, with an index that matches them."""
    inode = (store / "index").stat().st_ino
    (store / "index").rename(store / "index-of-before")
    (store / "index").symlink_to("index-of-before")
    store.chmod(0o777)
    read()
    assert not (store / "index").is_symlink()
    assert (store / "index").stat().st_ino != inode
    assert "cache.store.discarded" in {event.name for event in events}


@pytest.mark.parametrize(
    "name", ["index", "objects", "segments", "counters", "index/index.mdb", "index/index.mdb-lock", "index/signals"]
)
def test_link_in_place_of_store_directory_is_not_followed(
    name: str, store: Path, tmp_path: Path, read: Callable[[], None], events: list[Event]
) -> None:
    """The cache is not used, reads continue, and the target of the link is unchanged."""
    part = store / name
    elsewhere = tmp_path / "elsewhere"
    part.rename(elsewhere)
    part.symlink_to(elsewhere)
    before = contents(elsewhere)
    read()
    assert any(str(part) in event.detail for event in events if event.name == "cache.disk.failed")
    assert contents(elsewhere) == before
    part.unlink()
    elsewhere.rename(part)
    events.clear()
    read()
    assert "cache.disk.failed" not in {event.name for event in events}


def test_unusable_cache_directory_is_logged_in_one_line(
    store: Path, read: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    (store / "locks").unlink(missing_ok=True)
    (store / "locks").symlink_to("elsewhere")
    read()
    assert [message.count("no caching in") for message in caplog.messages] == [1]


@pytest.mark.parametrize("name", ["setup.lock", "locks", "FORMAT", "rules.json"])
def test_link_in_place_of_store_file_is_not_followed(
    name: str, store: Path, tmp_path: Path, read: Callable[[], None], events: list[Event]
) -> None:
    (store / name).unlink(missing_ok=True)
    (store / name).symlink_to(tmp_path / "made-by-following")
    read()
    assert not (tmp_path / "made-by-following").exists()
    assert any(str(store / name) in event.detail for event in events if event.name == "cache.disk.failed")


@pytest.mark.parametrize("name", ["index/signals", "locks", "setup.lock", "rules.json"])
def test_file_with_second_hard_link_is_not_written(
    name: str, store: Path, tmp_path: Path, read: Callable[[], None], events: list[Event]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (store / name).unlink(missing_ok=True)
    (store / name).hardlink_to(victim)
    read()
    assert victim.read_text() == "precious"
    assert any(str(store / name) in event.detail for event in events if event.name == "cache.disk.failed")


def test_link_in_place_of_the_store_is_not_followed(
    store: Path, tmp_path: Path, read: Callable[[], None], events: list[Event]
) -> None:
    for part in (store, store.parent):
        part.rename(tmp_path / "elsewhere")
        part.symlink_to(tmp_path / "elsewhere")
        before = contents(tmp_path / "elsewhere")
        read()
        assert contents(tmp_path / "elsewhere") == before
        part.unlink()
        (tmp_path / "elsewhere").rename(part)
    assert [event.name for event in events if event.name == "cache.disk.failed"]


def test_link_in_place_of_data_directory_is_not_followed(store: Path, tmp_path: Path, read: Callable[[], None]) -> None:
    """`O_NOFOLLOW` applies only to the last part of a path."""
    (folder,) = (store / "objects").iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    read()
    assert contents(tmp_path / "elsewhere") == before


def test_link_in_place_of_data_file_is_not_read(store: Path, tmp_path: Path, read: Callable[[], None]) -> None:
    """`read` compares; an attacker would plant a file of the same size with other bytes."""
    files = [path for name in ("objects", "segments") for path in (store / name).rglob("*") if path.is_file()]
    assert len(files) >= 3
    for number, path in enumerate(files):
        planted = tmp_path / f"planted-{number}"
        planted.write_bytes(bytes(path.stat().st_size))
        path.unlink()
        path.symlink_to(planted)
    read()
    for number in range(len(files)):
        assert not any((tmp_path / f"planted-{number}").read_bytes())


@pytest.mark.root
def test_store_parts_of_another_user_are_refused(store: Path, read: Callable[[], None], events: list[Event]) -> None:
    for name in ("index/index.mdb", "objects", "setup.lock"):
        os.chown(store / name, 65534, 65534)
        events.clear()
        read()
        assert any(str(store / name) in event.detail for event in events if event.name == "cache.disk.failed")
        os.chown(store / name, 0, 0)


@pytest.mark.parametrize("name", ["lock", "id", "tag", "node.json"])
def test_link_in_node_directory_is_not_followed(name: str, tmp_path: Path) -> None:
    options = resolve({"cache_dir": str(tmp_path / "c")})
    folder = NodeFolder.claim(options)
    folder.close()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder.directory / name).unlink(missing_ok=True)
    (folder.directory / name).symlink_to(victim)
    if name == "lock":
        with pytest.raises(StorageError, match="symbolic link"):
            NodeFolder.claim(options)
    else:
        again = NodeFolder.claim(options)
        assert again.member_id != "precious"
        again.close()
    assert victim.read_text() == "precious"


def test_private_directory_is_created_with_its_parents(tmp_path: Path, no_umask: None) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    assert set(modes(tmp_path).values()) == {0o700}


@pytest.mark.parametrize("place", ["/proc/millrace-cache", "/proc/self/millrace/a/b"])
def test_directory_that_cannot_be_created_raises_os_error(place: str) -> None:
    """The kernel reports that the parent directory is missing, although it exists."""
    with pytest.raises(OSError, match="No such file"):
        make_folder(Path(place))


def contents(path: Path) -> dict[str, bytes]:
    """Every byte of a file, or of all below a folder."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    return {str(found): found.read_bytes() for found in files}
