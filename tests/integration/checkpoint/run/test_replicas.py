"""`CheckpointManager(replicas=)`: the newest save is on other nodes' disks, too, and is restored from there."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.checkpoint.run.test_manager import change, empty_like, make_state
from tests.integration.security.test_plane import Authority
from tests.support.harms import flip_in_the_middle
from tests.support.replicas import TOKEN, ReplicaNodes
from tests.support.savers import FEW_TRIES, PATIENT_WITH_NODES, pid_of, savers_with
from tests.support.seen_events import seen_events
from tests.support.states import assert_same_state
from tests.support.waiting import wait_until

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.run.peers import ClusterAccess, Peers, replica_order
from millrace.checkpoint.run.tiers import run_directory
from millrace.checkpoint.storage import peer_files
from millrace.config import resolve
from millrace.errors import ConfigurationError, MillraceError, SaverDiedError
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

FIRST, SECOND, THIRD = (f"step-{step:012d}" for step in (1, 2, 3))


@pytest.fixture
def region(runs_server: S3Server) -> Iterator[EmulatedRegion]:
    with EmulatedRegion(runs_server.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        yield region


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A node that a busy machine stops for some seconds is not lost, except in the test about a silent one."""
    if "silent" in request.node.name:
        yield
        return
    for name in ("LIST_SECONDS", "DATA_SECONDS"):
        monkeypatch.setattr(peer_files, name, 60.0)
    with savers_with(PATIENT_WITH_NODES):
        yield


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[ReplicaNodes]:
    with ReplicaNodes(tmp_path / "nodes") as nodes:
        yield nodes


def names(seen: list[Any]) -> list[str]:
    return [event.name for event in seen]


def has(seen: list[Any], name: str, text: str = "") -> bool:
    return any(event.name == name and text in str(event.detail) for event in seen)


def no_uploads(region: EmulatedRegion) -> None:
    """From now on the store accepts no data files. (A status of 503 would also pause all other requests.)"""
    region.fail("status", status=500, method="PUT", path="*data-*", count=None)


def options_of(runs_server: S3Server, region: EmulatedRegion) -> dict[str, Any]:
    return {**runs_server.target_options, "endpoint_url": region.endpoint_url}


@pytest.fixture(params=["static", "TLS", pytest.param("etcd", marks=pytest.mark.etcd)])
def any_nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReplicaNodes]:
    options: dict[str, Any] = {}
    if request.param == "etcd":
        options["members"] = f"{request.getfixturevalue('etcd').members}/replicas"
    if request.param == "TLS":
        options["tls"] = tmp_path / "pem"
        options["tls"].mkdir()
        tls = Authority(options["tls"], "ours").member("node")
        for name, path in (("cert", tls.cert), ("key", tls.key), ("ca", tls.ca)):
            path.rename(options["tls"] / f"{name}.pem")
    with ReplicaNodes(tmp_path / "nodes", **options) as nodes:
        yield nodes


@pytest.mark.slow
def test_save_survives_the_loss_of_its_node_before_the_upload(
    tmp_path: Path, runs_server: S3Server, region: EmulatedRegion, any_nodes: ReplicaNodes
) -> None:
    nodes = any_nodes
    url, options, state = f"s3://runs/{tmp_path.name}", options_of(runs_server, region), make_state()
    with seen_events() as seen, nodes.on(0):
        run = CheckpointManager(url, local=tmp_path / "local", replicas=1, target_options=options)
        run.save(1, state)
        wait_until(lambda: has(seen, "checkpoint.replicated", FIRST))
        change(state)
        expected = copy.deepcopy(state)
        no_uploads(region)
        pending = run.save_async(2, state)
        wait_until(lambda: has(seen, "checkpoint.replicated", SECOND))
        assert not pending.done()
        (holder,) = nodes.holders(SECOND)
        assert holder != 0
        local = {path.name: path.read_bytes() for path in tmp_path.glob(f"local/*/{SECOND}/*")}
        assert {p.name: p.read_bytes() for p in nodes.replicas()[holder] if p.parent.name == SECOND} == local
        os.kill(pid_of(run), signal.SIGKILL)
        assert isinstance(pending.exception(), SaverDiedError)
        with contextlib.suppress(MillraceError):
            run.close()
    region.clear_faults()
    nodes.stop(0)
    shutil.rmtree(tmp_path / "local")
    other = next(number for number in (1, 2) if number != holder)
    with seen_events() as seen, nodes.on(other):
        with CheckpointManager(url, local=tmp_path / "other", replicas=1, target_options=options) as again:
            found = empty_like(state)
            assert again.restore(found) == 2
            assert_same_state(found, expected)
        assert has(seen, "run.restored", "from other nodes")


def order_of(nodes: ReplicaNodes, url: str, options: dict[str, Any], me: int = 0) -> list[int]:
    """The nodes in the order in which they get the replicas of a node."""
    ids = {number: nodes.node(number).member_id for number in range(3)}
    order = replica_order(run_directory(url, options), ids[me], ids.values())
    return [next(number for number, name in ids.items() if name == each) for each in order]


@pytest.mark.slow
def test_replicas_of_steps_in_the_store_are_deleted_when_a_newer_one_is_safe(
    tmp_path: Path, runs_server: S3Server, region: EmulatedRegion, nodes: ReplicaNodes
) -> None:
    url, options, state = "s3://runs/obsolete", options_of(runs_server, region), make_state()
    with seen_events() as seen, nodes.on(0), savers_with(FEW_TRIES):
        run = CheckpointManager(url, local=tmp_path / "local", replicas=1, target_options=options)
        for name, step in ((FIRST, 1), (SECOND, 2), (THIRD, 3)):
            run.save_async(step, state).result()
            wait_until(lambda name=name: has(seen, "checkpoint.replicated", name))
            change(state)
        first = order_of(nodes, url, options)[0]
        wait_until(lambda: {path.parent.name for path in nodes.replicas()[first]} == {THIRD})
        # During an outage of the store everything that it lacks stays.
        no_uploads(region)
        assert run.save_async(4, state).exception() is not None
        assert run.save_async(5, state).exception() is not None  # unchanged: it has no data files of its own
        last = f"step-{5:012d}"
        wait_until(lambda: has(seen, "checkpoint.replicated", last))
        wait_until(lambda: not nodes.holders(THIRD))
        assert nodes.holders(f"step-{4:012d}") == nodes.holders(last) == [first]
        region.clear_faults()
        run.save_async(6, state).result()
        wait_until(lambda: not nodes.holders(last))
        assert nodes.holders(f"step-{6:012d}") == [first]
        run.close()


def test_full_node_costs_an_event_and_the_next_one_is_tried(
    tmp_path: Path, runs_server: S3Server, nodes: ReplicaNodes
) -> None:
    url, options, state = "s3://runs/full", runs_server.target_options, make_state()
    first, second = order_of(nodes, url, options)
    nodes.stop(first)
    nodes.start(first, capacity="2MB")
    with seen_events() as seen, nodes.on(0):
        with CheckpointManager(url, local=tmp_path / "local", replicas=1, target_options=options) as run:
            run.save(1, state)
            wait_until(lambda: has(seen, "checkpoint.replicated", FIRST))
            assert nodes.holders(FIRST) == [second]
            assert has(seen, "checkpoint.replica.failed", "no space")
            nodes.stop(second)
            nodes.start(second, capacity="2MB")
            change(state)
            assert run.save_async(2, state).result() is not None
            wait_until(lambda: names(seen).count("checkpoint.replica.failed") >= 3)
        assert not has(seen, "checkpoint.replicated", SECOND)


@pytest.mark.slow
def test_silent_node_costs_an_event_and_no_save(tmp_path: Path, runs_server: S3Server, nodes: ReplicaNodes) -> None:
    url, options, state = "s3://runs/silent", runs_server.target_options, make_state()
    first, second = order_of(nodes, url, options)
    host, _, port = nodes.node(first).address.rpartition(":")
    nodes.stop(first)
    with socket.socket() as silent, seen_events() as seen, nodes.on(0):
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind((host, int(port)))
        silent.listen(100)  # it accepts connections, and never responds
        with CheckpointManager(url, local=tmp_path / "local", replicas=1, target_options=options) as run:
            assert run.save_async(1, state).result() is not None
            wait_until(lambda: has(seen, "checkpoint.replicated", FIRST))
        assert nodes.holders(FIRST) == [second]
        assert has(seen, "checkpoint.tier.unreachable")


def test_copy_of_a_save_to_a_node_that_ends_meanwhile_continues_with_the_next_one(
    tmp_path: Path, runs_server: S3Server, nodes: ReplicaNodes
) -> None:
    url, options, state = "s3://runs/ends", runs_server.target_options, make_state()
    for number in (1, 2):
        nodes.stop(number)
    with seen_events() as seen, nodes.on(0):
        with CheckpointManager(url, local=tmp_path / "local", replicas=1, target_options=options) as run:
            run.save(1, state)
            wait_until(lambda: has(seen, "checkpoint.replica.failed", "no more members"))
            nodes.start(1)
            change(state)
            run.save(2, state)
            wait_until(lambda: has(seen, "checkpoint.replicated", SECOND))
        assert nodes.holders(SECOND) == [1]
        assert nodes.holders(FIRST) == []


def test_damaged_replica_is_read_from_the_store(tmp_path: Path, runs_server: S3Server, nodes: ReplicaNodes) -> None:
    url, options, state = "s3://runs/damaged", runs_server.target_options, make_state()
    with seen_events() as seen, nodes.on(0):
        with CheckpointManager(url, local=tmp_path / "local", replicas=2, target_options=options) as run:
            run.save(1, state)
            wait_until(lambda: has(seen, "checkpoint.replicated", FIRST))
        assert nodes.holders(FIRST) == [1, 2]
        for paths in nodes.replicas().values():
            for path in paths:
                if path.name.startswith("data"):
                    flip_in_the_middle(path)
        shutil.rmtree(tmp_path / "local")
        with CheckpointManager(url, local=tmp_path / "other", replicas=1, target_options=options) as run:
            found = empty_like(state)
            assert run.restore(found) == 1
        assert_same_state(found, state)
        assert has(seen, "checkpoint.tier.damaged")
        (line,) = [event.detail for event in seen if event.name == "run.restored"]
        assert "from the store" in line


@pytest.mark.slow
def test_run_continues_after_a_restore_from_a_replica(
    tmp_path: Path, runs_server: S3Server, region: EmulatedRegion, nodes: ReplicaNodes
) -> None:
    url, options, state = "s3://runs/continues", options_of(runs_server, region), make_state()
    with seen_events() as seen, nodes.on(0), savers_with(FEW_TRIES):
        run = CheckpointManager(url, local=tmp_path / "local", replicas=1, target_options=options)
        no_uploads(region)
        assert run.save_async(1, state).exception() is not None
        wait_until(lambda: has(seen, "checkpoint.replicated", FIRST))
        with contextlib.suppress(MillraceError):
            run.close()
    region.clear_faults()
    shutil.rmtree(tmp_path / "local")
    with (
        seen_events() as seen,
        nodes.on(2),
        CheckpointManager(url, local=tmp_path / "other", replicas=1, target_options=options) as run,
    ):
        assert run.steps() == [1]
        found = empty_like(state)
        assert run.restore(found) == 1
        assert_same_state(found, state)
        change(found)
        run.save(2, found)
        wait_until(lambda: has(seen, "checkpoint.replicated", SECOND))
        wait_until(lambda: not nodes.holders(FIRST))
    with CheckpointManager(url, target_options=options) as run:
        again = empty_like(state)
        assert run.restore(again) == 2
        assert_same_state(again, found)


def test_nodes_that_restart_with_another_token_are_found_again(nodes: ReplicaNodes) -> None:
    """A training may run for weeks."""
    with nodes.on(0):
        peers = Peers(ClusterAccess.find(), "run-0123456789abcdef", count=1)
    assert len(peers.look()) == 3
    for number in range(3):
        nodes.stop(number)
    assert not peers.look()
    for number in range(3):
        nodes.start(number, cluster_token=f"another-{TOKEN}")
    assert len(peers.look()) == 3
    assert len(peers.targets()) == 2
    peers.close()


def test_replicas_without_a_cluster_or_a_local_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLRACE_MEMBERS", raising=False)
    with pytest.raises(ConfigurationError, match="needs a cluster"):
        CheckpointManager(tmp_path / "run", local=tmp_path / "local", replicas=1)
    with pytest.raises(ConfigurationError, match="without local="):
        CheckpointManager(tmp_path / "run", replicas=1)
    with pytest.raises(TypeError):
        CheckpointManager(tmp_path / "run", replica=tmp_path / "second")  # type: ignore[call-arg]


def test_access_of_the_saver_process_does_not_show_the_token(nodes: ReplicaNodes) -> None:
    with nodes.on(0):
        access = ClusterAccess.find()
        assert access.node is not None
        assert access.link().token == TOKEN
        assert TOKEN.encode() not in pickle.dumps(access)
    client = ClusterAccess(options=resolve({"members": nodes.members, "cluster_token": TOKEN}, environ={}, file={}))
    assert TOKEN not in repr(client)
