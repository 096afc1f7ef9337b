"""A node's folder: who holds it, its id, and what it tells the machine's other processes."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.config import CacheOptions, Tls, resolve
from millrace.errors import StorageError
from millrace.members import Member, View
from millrace.peers.folder import FolderViews, NodeFolder, is_held, live_nodes, read_facts

VIEW = View.of([Member(id="a", address="h:1", weight=5.0)])
OTHER = View.of([Member(id="a", address="h:1"), Member(id="b", address="h:2")])
PUBLISHED: dict[str, Any] = {"address": "h:1", "token": "a-secret-token", "members": "etcd://e:1"}

Claim = Callable[..., NodeFolder]


@pytest.fixture
def options(tmp_path: Path) -> CacheOptions:
    return resolve({"cache_dir": str(tmp_path / "cache")}, environ={}, file={})


@pytest.fixture
def claim(options: CacheOptions) -> Iterator[Claim]:
    folders: list[NodeFolder] = []

    def make(options: CacheOptions = options, **arguments: str) -> NodeFolder:
        folders.append(NodeFolder.claim(options, **arguments))
        return folders[-1]

    yield make
    for folder in folders:
        folder.close()


def at_next_look(views: FolderViews) -> FolderViews:
    views._next_stat = 0.0
    return views


def test_nodes_of_one_directory_take_folders_in_turn(claim: Claim) -> None:
    first, second, third = claim(), claim(), claim()
    assert [first.name, second.name, third.name] == ["local", "node-1", "node-2"]
    assert len({first.member_id, second.member_id, third.member_id}) == 3
    second.close()
    again = claim()
    assert (again.name, again.member_id) == ("node-1", second.member_id)


def test_the_folder_of_its_tag_comes_first(claim: Claim) -> None:
    folders = [claim(tag=tag) for tag in ("x", "y", "z")]
    for folder in folders:
        folder.close()
    assert claim(tag="z").name == "node-2"
    assert claim(tag="new").name == "local"
    assert claim(tag="y").name == "node-1"
    assert claim(tag="y").name == "node-3"


def test_a_damaged_id_is_replaced(claim: Claim) -> None:
    folder = claim()
    folder.close()
    (folder.directory / "id").write_bytes(b"")  # as after a crash of the machine
    again = claim()
    assert again.name == "local"
    assert again.member_id
    again.close()
    assert claim().member_id == again.member_id


def test_several_directories_are_claimed_together(claim: Claim, tmp_path: Path) -> None:
    both = resolve({"cache_dir": [str(tmp_path / "1"), str(tmp_path / "2")]}, environ={}, file={})
    second = resolve({"cache_dir": str(tmp_path / "2")}, environ={}, file={})
    folder = claim(both)
    folder.publish(VIEW, **PUBLISHED)
    assert claim(second).name == "node-1"
    assert [node.name for node in live_nodes(second)] == ["local"]
    # Neither is left locked by a claim that got only one of them.
    assert claim(both).name == "node-2"
    assert not is_held(tmp_path / "1" / "millrace" / "node-1.node")
    folder.close()
    first = resolve({"cache_dir": str(tmp_path / "1")}, environ={}, file={})
    assert claim(first).member_id == folder.member_id


@pytest.mark.root
def test_a_directory_of_another_user_is_refused(options: CacheOptions) -> None:
    parent = options.cache_dirs[0] / "millrace"
    parent.mkdir(parents=True)
    os.chown(parent, 1, 1)
    with pytest.raises(StorageError, match="another user"):
        NodeFolder.claim(options)


def test_what_is_published_is_read(claim: Claim, options: CacheOptions, tmp_path: Path) -> None:
    folder = claim()
    views = FolderViews(folder.directory)
    assert (views.view(), views.facts(), live_nodes(options)) == (View(()), None, [])
    tls = Tls(cert=tmp_path / "c", key=tmp_path / "k", ca=tmp_path / "ca")
    folder.publish(VIEW, **PUBLISHED, replicas=2, tls=tls)
    assert at_next_look(views).view() == VIEW
    facts = views.facts()
    assert facts is not None
    assert (facts.member_id, facts.address, facts.token, facts.members, facts.replicas, facts.tls, facts.pid) == (
        *(folder.member_id, "h:1", "a-secret-token", "etcd://e:1", 2, tls, os.getpid()),
    )
    assert "a-secret-token" not in repr(facts)
    assert [(node.name, node.facts) for node in live_nodes(options)] == [("local", facts)]
    folder.publish(OTHER, **PUBLISHED, member_id="h:1")
    assert at_next_look(views).view() == OTHER
    (node,) = live_nodes(options)
    assert node.facts.member_id == "h:1"


def test_only_the_user_may_read_the_token(claim: Claim) -> None:
    folder = claim()
    old = os.umask(0)
    try:
        folder.publish(VIEW, **PUBLISHED)
    finally:
        os.umask(old)
    assert stat.S_IMODE((folder.directory / "node.json").stat().st_mode) == 0o600


def test_a_view_stays_when_its_node_is_gone_and_follows_the_next_one(claim: Claim, options: CacheOptions) -> None:
    folder = claim()
    folder.publish(VIEW, **PUBLISHED)
    views = FolderViews(folder.directory)
    folder.close()
    assert at_next_look(views).view() == VIEW
    assert live_nodes(options) == []
    successor = claim()
    assert live_nodes(options) == []  # what the dead one said is not what this one says
    successor.publish(OTHER, **PUBLISHED)
    assert at_next_look(views).view() == OTHER


def test_the_file_is_looked_at_ten_times_a_second_at_most(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = claim()
    folder.publish(VIEW, **PUBLISHED)
    now = 1000.0
    monkeypatch.setattr("millrace.peers.folder.time.monotonic", lambda: now)
    views = FolderViews(folder.directory)
    folder.publish(OTHER, **PUBLISHED)
    now += 0.09
    assert views.view() == VIEW
    now += 0.02
    assert views.view() == OTHER


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"member_id": 1}', "\udcff"])
def test_damaged_facts_are_none(claim: Claim, text: str) -> None:
    folder = claim()
    folder.publish(VIEW, **PUBLISHED)
    views = FolderViews(folder.directory)
    (folder.directory / "node.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_facts(folder.directory) is None
    assert at_next_look(views).view() == VIEW


def test_a_folder_that_was_removed_is_made_again(claim: Claim, options: CacheOptions, tmp_path: Path) -> None:
    folder = claim()
    folder.publish(VIEW, **PUBLISHED)
    os.rename(tmp_path / "cache", tmp_path / "away")
    folder.publish(OTHER, **PUBLISHED)
    (node,) = live_nodes(options)
    assert node.facts.view == OTHER
    assert claim().name == "node-1"
    folder.close()
    assert claim().member_id == folder.member_id


def test_a_folder_that_was_removed_and_taken_is_given_up(claim: Claim, tmp_path: Path) -> None:
    folder = claim()
    os.rename(tmp_path / "cache", tmp_path / "away")
    assert claim().name == "local"
    with pytest.raises(StorageError, match="another node has taken it"):
        folder.publish(VIEW, **PUBLISHED)


def test_a_forked_child_does_not_hold_the_folder(claim: Claim, options: CacheOptions) -> None:
    folder = claim()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            folder.publish(VIEW, **PUBLISHED)
        except StorageError:
            os.write(writing, b"x")
            signal.pause()
        os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x"
        folder.close()
        assert claim().name == "local"
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(reading)
    assert os.WTERMSIG(status) == signal.SIGKILL


CLAIM = """
import sys
from millrace.config import resolve
from millrace.members import View
from millrace.peers.folder import NodeFolder
sys.stdin.readline()
folder = NodeFolder.claim(resolve({"cache_dir": sys.argv[1]}, environ={}, file={}))
print(folder.name, folder.member_id, flush=True)
sys.stdin.readline()
"""


def test_eight_processes_claim_at_once_and_a_killed_one_is_succeeded(claim: Claim, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM, str(cache_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.stdout.readline().split() for process in processes if process.stdout is not None]
        names = sorted(name for name, _ in answers)
        assert names == ["local", *(f"node-{number}" for number in range(1, 8))]
        assert len({member_id for _, member_id in answers}) == 8
        store = cache_dir / "millrace" / "node-3"
        store.mkdir()
        victim = next(place for place, (name, _) in enumerate(answers) if name == "node-3")
        processes[victim].kill()
        processes[victim].wait()
        successor = claim()
        assert [successor.name, successor.member_id] == answers[victim]
        assert claim().name == "node-8"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_says_is_not_believed(claim: Claim, options: CacheOptions) -> None:
    folder = claim()
    folder.publish(VIEW, **PUBLISHED)
    assert [live.facts.token for live in live_nodes(options)] == [PUBLISHED["token"]]
    os.chown(folder.directory / "node.json", 12345, 12345)
    assert read_facts(folder.directory) is None
    assert live_nodes(options) == []


def test_what_is_no_file_is_not_waited_for(claim: Claim) -> None:
    folder = claim()
    os.mkfifo(folder.directory / "node.json")
    assert read_facts(folder.directory) is None
