"""A node's share in a load of the whole cluster: its extent, its order, and its end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.cache.node import CacheNode, cache_node
from millrace.cluster.load_order import LoadOrder
from millrace.cluster.membership import Member, View
from millrace.cluster.placement import STRIPE_BYTES, WHOLE_BYTES
from millrace.config import resolve
from millrace.errors import DeniedError, UsageError
from millrace.node.load_jobs import LoadJobs, share_of
from millrace.origin import ObjectInfo, Origin, open_origin

NAMES = ("a", "b", "c")
VIEW = View.of(Member(id=name, address=f"127.0.0.1:{number}") for number, name in enumerate(NAMES, 1))
MANY = [ObjectInfo(key=f"/data/{number}", size=1000, version="v", modified=0.0) for number in range(300)]


def order(**changes: Any) -> LoadOrder:
    return replace(LoadOrder(origin_identity="file", keys=("/data",), members=VIEW), **changes)


def test_share_of_every_object_belongs_to_one_node() -> None:
    shares = [share_of(name, order()) for name in NAMES]
    for info in MANY:
        assert [share(info) for share in shares if share(info)] == [[(0, 1000)]]
    assert all(any(share(info) for info in MANY) for share in shares)
    assert not any(share_of("stranger", order())(info) for info in MANY)


def test_share_with_copies_excludes_the_owners() -> None:
    owns = [share_of(name, order(replicas=2)) for name in NAMES]
    holds = [share_of(name, order(replicas=2, copies=True)) for name in NAMES]
    for info in MANY:
        (owner,) = [name for name, share in zip(NAMES, owns, strict=True) if share(info)]
        (holder,) = [name for name, share in zip(NAMES, holds, strict=True) if share(info)]
        assert owner != holder
    assert not any(share_of(name, order(copies=True))(MANY[0]) for name in NAMES)


def test_share_of_a_large_object_is_divided_by_stripes() -> None:
    size = WHOLE_BYTES + STRIPE_BYTES * 12 + 5
    info = ObjectInfo(key="/data/large", size=size, version="v", modified=0.0)
    shares = [share_of(name, order())(info) for name in NAMES]
    assert all(shares)
    spans = sorted(span for share in shares for span in share)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == size


def test_share_of_an_empty_object_belongs_to_one_node() -> None:
    info = ObjectInfo(key="/data/empty", size=0, version="v", modified=0.0)
    assert [share for name in NAMES if (share := share_of(name, order())(info))] == [[(0, 0)]]


def test_load_order_round_trip_is_equal() -> None:
    sent = order(replicas=2, verify=True, copies=True)
    assert LoadOrder.from_json(json.loads(json.dumps({"job": "x", "later": 1, **sent.to_json()}))) == sent


@pytest.mark.parametrize(
    "change",
    [{"keys": []}, {"keys": "x"}, {"keys": [1]}, {"view": {}}, {"view": None}, {"origin": ...}, {"replicas": "many"}],
)
def test_load_order_that_is_malformed_is_refused(change: dict[str, Any]) -> None:
    value = {**order().to_json(), **change}
    with pytest.raises(UsageError, match="malformed load order"):
        LoadOrder.from_json({name: each for name, each in value.items() if each is not ...})
    with pytest.raises(UsageError):
        LoadOrder.from_json(None)


# --- jobs over local files ------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    for number in range(30):
        (directory / f"{number}.bin").write_bytes(os.urandom(1000 + number))
    return directory


@pytest.fixture
def make_node(tmp_path: Path) -> Callable[[str], CacheNode]:
    def make(name: str) -> CacheNode:
        return cache_node(resolve({"cache_dir": str(tmp_path / name), "min_free": 0, "members": "none"}))

    return make


def finished(jobs: LoadJobs, name: str) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while (state := jobs.state(name)) is None or state["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return state


def test_load_jobs_of_three_nodes_load_everything_once(data: Path, make_node: Callable[[str], CacheNode]) -> None:
    origin = open_origin("file")
    wanted = order(keys=(f"{data}/*.bin",))
    reported = []
    for name in NAMES:
        node = make_node(name)
        jobs = LoadJobs(node, lambda _: origin, member_id=name)
        jobs.start("job", wanted)
        reported.append(finished(jobs, "job"))
        assert len(node.entries()) == reported[-1]["progress"]["done_objects"]
        # A second start with the same id returns the same job.
        assert jobs.start("job", wanted)["state"] == "done"
        jobs.close()
    assert [each["state"] for each in reported] == ["done"] * 3
    assert sum(each["progress"]["done_objects"] for each in reported) == 30
    assert sum(each["progress"]["fetched_bytes"] for each in reported) == sum(1000 + number for number in range(30))
    assert all(0 < each["progress"]["objects"] < 30 for each in reported)


def test_load_job_of_a_missing_object_reports_it(data: Path, make_node: Callable[[str], CacheNode]) -> None:
    origin = open_origin("file")
    jobs = LoadJobs(make_node("a"), lambda _: origin, member_id="a")
    jobs.start("job", order(keys=(f"{data}/nothing",)))
    reported = finished(jobs, "job")
    assert reported["state"] == "failed"
    assert reported["error"]["code"] == "object-not-found"
    assert "nothing does not exist" in reported["error"]["message"]


def test_load_job_without_access_is_refused(make_node: Callable[[str], CacheNode]) -> None:
    jobs = LoadJobs(make_node("a"), lambda _: None, member_id="a")
    with pytest.raises(DeniedError, match="no access to file: start it with --origin"):
        jobs.start("job", order())
    assert jobs.state("job") is None
    jobs.cancel("job")


def test_load_jobs_after_close_refuse_new_ones(make_node: Callable[[str], CacheNode]) -> None:
    jobs = LoadJobs(make_node("a"), lambda _: open_origin("file"), member_id="a")
    jobs.close()
    with pytest.raises(UsageError, match="stopping"):
        jobs.start("job", order())


def test_load_jobs_respond_while_the_access_for_another_load_is_looked_up(
    data: Path, make_node: Callable[[str], CacheNode]
) -> None:
    begun, may_end, local = threading.Event(), threading.Event(), open_origin("file")

    def find(identity: str) -> Origin | None:
        if identity == "file":
            return local
        begun.set()
        assert may_end.wait(120)
        return None

    jobs = LoadJobs(make_node("a"), find, member_id="a")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(jobs.start, "other", order(origin_identity="s3"))
        try:
            assert begun.wait(120)
            pool.submit(jobs.start, "job", order(keys=(str(data),), members=View.of(VIEW.members[:1]))).result(60)
            assert finished(jobs, "job")["progress"]["done_objects"] == 30
        finally:
            may_end.set()
        with pytest.raises(DeniedError):
            other.result()
    jobs.close()
