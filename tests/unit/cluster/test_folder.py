"""A node's folder: its claim, its id, and the facts that it publishes."""

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cluster.folder import FolderViews, NodeFacts, NodeFolder, is_held, live_nodes, read_facts
from millrace.cluster.membership import Member, View
from millrace.config import Amount, CacheOptions, Tls, resolve
from millrace.errors import StorageError

VIEW = View.of([Member(id="a", address="h:1", weight=5.0)])
OTHER = View.of([Member(id="a", address="h:1"), Member(id="b", address="h:2")])
TOKEN = "a-secret-token"

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


def publish(folder: NodeFolder, view: View, **changes: Any) -> None:
    given: dict[str, Any] = {
        "member_id": folder.member_id,
        "address": "h:1",
        "token": TOKEN,
        "members": "etcd://e:1",
        "replicas": 1,
        "tls": None,
        "pid": os.getpid(),
        "view": view,
        "capacity": Amount(share=0.8),
        "min_free": Amount(nbytes=5),
    }
    folder.publish(NodeFacts(**{**given, **changes}))


def at_next_look(views: FolderViews) -> FolderViews:
    views._next_stat = 0.0
    return views


def test_claims_of_one_directory_use_folders_in_order(claim: Claim) -> None:
    first, second, third = claim(), claim(), claim()
    assert [first.name, second.name, third.name] == ["local", "node-1", "node-2"]
    assert len({first.member_id, second.member_id, third.member_id}) == 3
    second.close()
    again = claim()
    assert (again.name, again.member_id) == ("node-1", second.member_id)


def test_claim_with_a_tag_prefers_its_folder(claim: Claim) -> None:
    folders = [claim(tag=tag) for tag in ("x", "y", "z")]
    for folder in folders:
        folder.close()
    assert claim(tag="z").name == "node-2"
    assert claim(tag="new").name == "local"
    assert claim(tag="y").name == "node-1"
    assert claim(tag="y").name == "node-3"


@pytest.mark.parametrize("damage", [b"", b"{id}x", b"x" * 5000, b"\xff" * 32, b"\0" * 32, b"{id}\n{id}"])
def test_claim_of_a_folder_with_a_damaged_id_replaces_it(claim: Claim, damage: bytes) -> None:
    folder = claim()
    folder.close()
    (folder.directory / "id").write_bytes(damage.replace(b"{id}", folder.member_id.encode()))
    again = claim()
    assert again.name == "local"
    assert re.fullmatch("[0-9a-f]{32}", again.member_id)
    again.close()
    assert claim().member_id == again.member_id


def test_claim_of_several_directories_holds_all(claim: Claim, tmp_path: Path) -> None:
    both = resolve({"cache_dir": [str(tmp_path / "1"), str(tmp_path / "2")]}, environ={}, file={})
    second = resolve({"cache_dir": str(tmp_path / "2")}, environ={}, file={})
    folder = claim(both)
    publish(folder, VIEW)
    assert claim(second).name == "node-1"
    assert [node.name for node in live_nodes(second)] == ["local"]
    # Neither is left locked by a claim that got only one of them.
    assert claim(both).name == "node-2"
    assert not is_held(tmp_path / "1" / "millrace" / "node-1.node")
    folder.close()
    first = resolve({"cache_dir": str(tmp_path / "1")}, environ={}, file={})
    assert claim(first).member_id == folder.member_id


@pytest.mark.root
def test_claim_of_another_users_directory_is_refused(options: CacheOptions) -> None:
    parent = options.cache_dirs[0] / "millrace"
    parent.mkdir(parents=True)
    os.chown(parent, 1, 1)
    with pytest.raises(StorageError, match="another user"):
        NodeFolder.claim(options)


def test_facts_that_are_published_are_read(claim: Claim, options: CacheOptions, tmp_path: Path) -> None:
    folder = claim()
    views = FolderViews(folder.directory)
    assert (views.view(), views.facts(), live_nodes(options)) == (View(()), None, [])
    tls = Tls(cert=tmp_path / "c", key=tmp_path / "k", ca=tmp_path / "ca")
    publish(folder, VIEW, replicas=2, tls=tls)
    assert at_next_look(views).view() == VIEW
    facts = views.facts()
    assert facts is not None
    assert (facts.member_id, facts.address, facts.token, facts.members, facts.replicas, facts.tls, facts.pid) == (
        *(folder.member_id, "h:1", "a-secret-token", "etcd://e:1", 2, tls, os.getpid()),
    )
    assert "a-secret-token" not in repr(facts)
    assert [(node.name, node.facts) for node in live_nodes(options)] == [("local", facts)]
    publish(folder, OTHER, member_id="h:1")
    assert at_next_look(views).view() == OTHER
    (node,) = live_nodes(options)
    assert node.facts.member_id == "h:1"


def test_facts_are_readable_by_the_user_only(claim: Claim) -> None:
    folder = claim()
    old = os.umask(0)
    try:
        publish(folder, VIEW)
    finally:
        os.umask(old)
    assert stat.S_IMODE((folder.directory / "node.json").stat().st_mode) == 0o600


def test_view_of_a_dead_node_stays_until_its_successor_publishes(claim: Claim, options: CacheOptions) -> None:
    folder = claim()
    publish(folder, VIEW)
    views = FolderViews(folder.directory)
    folder.close()
    assert at_next_look(views).view() == VIEW
    assert live_nodes(options) == []
    successor = claim()
    assert live_nodes(options) == []  # the facts of the dead node are invalid now
    publish(successor, OTHER)
    assert at_next_look(views).view() == OTHER


def test_views_check_the_file_every_100_ms(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = claim()
    publish(folder, VIEW)
    now = 1000.0
    monkeypatch.setattr("millrace.cluster.folder.time.monotonic", lambda: now)
    views = FolderViews(folder.directory)
    publish(folder, OTHER)
    now += 0.09
    assert views.view() == VIEW
    now += 0.02
    assert views.view() == OTHER


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"member_id": 1}', "\udcff"])
def test_facts_that_are_damaged_are_ignored(claim: Claim, text: str) -> None:
    folder = claim()
    publish(folder, VIEW)
    views = FolderViews(folder.directory)
    (folder.directory / "node.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_facts(folder.directory) is None
    assert at_next_look(views).view() == VIEW


def test_folder_that_was_removed_is_created_again(claim: Claim, options: CacheOptions, tmp_path: Path) -> None:
    folder = claim()
    publish(folder, VIEW)
    os.rename(tmp_path / "cache", tmp_path / "away")
    publish(folder, OTHER)
    (node,) = live_nodes(options)
    assert node.facts.view == OTHER
    assert claim().name == "node-1"
    folder.close()
    assert claim().member_id == folder.member_id


def test_folder_that_was_removed_and_claimed_raises(claim: Claim, tmp_path: Path) -> None:
    folder = claim()
    os.rename(tmp_path / "cache", tmp_path / "away")
    assert claim().name == "local"
    with pytest.raises(StorageError, match="another node has claimed it"):
        publish(folder, VIEW)


def test_claim_is_not_held_by_a_forked_child(claim: Claim, options: CacheOptions) -> None:
    folder = claim()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            publish(folder, VIEW)
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
from millrace.cluster.membership import View
from millrace.cluster.folder import NodeFolder
sys.stdin.readline()
folder = NodeFolder.claim(resolve({"cache_dir": sys.argv[1]}, environ={}, file={}))
print(folder.name, folder.member_id, flush=True)
sys.stdin.readline()
"""


def test_claims_of_eight_processes_are_distinct_and_one_of_a_killed_process_is_free(
    claim: Claim, tmp_path: Path
) -> None:
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
def test_facts_of_another_user_are_ignored(claim: Claim, options: CacheOptions) -> None:
    folder = claim()
    publish(folder, VIEW)
    assert [live.facts.token for live in live_nodes(options)] == [TOKEN]
    os.chown(folder.directory / "node.json", 12345, 12345)
    assert read_facts(folder.directory) is None
    assert live_nodes(options) == []


def test_facts_that_are_a_pipe_do_not_block(claim: Claim) -> None:
    folder = claim()
    os.mkfifo(folder.directory / "node.json")
    assert read_facts(folder.directory) is None
