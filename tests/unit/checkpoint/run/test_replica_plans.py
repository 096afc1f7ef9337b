"""Which nodes get replicas, which replicas are deleted, which files are absent, and when a copy is given up. Pure."""

from __future__ import annotations

from collections import Counter

import pytest

from millrace.checkpoint.format.manifest import DataFile
from millrace.checkpoint.run.peers import absent_files, is_too_slow, obsolete_replicas, replica_order
from millrace.checkpoint.run.timeline import Point

MEMBERS = [f"node-{number}" for number in range(12)]
NAME = "step-000000000002"


def test_replica_order_has_every_other_member_once() -> None:
    for me in MEMBERS:
        order = replica_order("run", me, MEMBERS)
        assert sorted([*order, me]) == sorted(MEMBERS)
        assert order == replica_order("run", me, reversed(MEMBERS))


def test_replica_order_gives_every_member_one_node() -> None:
    for count in (2, 3, 12):
        for rank in range(count - 1):
            chosen = Counter(replica_order("run", me, MEMBERS[:count])[rank] for me in MEMBERS[:count])
            assert set(chosen.values()) == {1}


def test_replica_order_differs_between_runs() -> None:
    assert len({replica_order(f"run-{number}", "node-0", MEMBERS)[0] for number in range(50)}) > 5


def test_replica_order_after_the_loss_of_a_member_changes_for_one_node() -> None:
    left = [name for name in MEMBERS if name != "node-5"]
    changed = [me for me in left if replica_order("run", me, left)[0] != replica_order("run", me, MEMBERS)[0]]
    assert [replica_order("run", me, MEMBERS)[0] for me in changed] == ["node-5"]


def test_replica_order_of_a_client_has_all_members_and_of_one_node_none() -> None:
    assert sorted(replica_order("run", "a-host", MEMBERS)) == sorted(MEMBERS)
    assert replica_order("run", "node-0", ["node-0"]) == []


@pytest.mark.parametrize(
    ("durable", "safe", "deleted"),
    [
        (None, None, []),
        (None, (3, 0), []),
        ((1, 0), (1, 0), []),
        ((1, 0), (2, 0), [(1, 0)]),
        ((2, 0), (2, 0), [(1, 0)]),
        ((2, 0), (3, 0), [(1, 0), (2, 0)]),
        ((3, 0), (3, 0), [(1, 0), (2, 0)]),
        ((3, 0), (2, 1), [(1, 0), (2, 0), (3, 0)]),
        ((2, 1), (2, 1), [(1, 0), (2, 0), (3, 0)]),
        ((2, 0), (2, 1), [(1, 0), (2, 0)]),
    ],
)
def test_replica_is_deleted_when_the_store_has_it_and_a_newer_one_is_safe(
    durable: tuple[int, int] | None, safe: tuple[int, int] | None, deleted: list[tuple[int, int]]
) -> None:
    replicas = [Point(1, 0), Point(2, 0), Point(3, 0), Point(2, 1)]
    found = obsolete_replicas(replicas, durable=durable and Point(*durable), safe=safe and Point(*safe))
    assert found == [Point(*each) for each in deleted]


@pytest.mark.parametrize(
    ("held", "absent"),
    [
        ({}, ["data-a", "data-b", "../step-000000000001/data-c"]),
        ({(NAME, "data-a"): 5, (NAME, "data-b"): 6}, ["../step-000000000001/data-c"]),
        ({(NAME, "data-a"): 5, (NAME, "data-b"): 5, ("step-000000000001", "data-c"): 7}, ["data-b"]),
        ({(NAME, "data-a"): 5, (NAME, "data-b"): 6, ("step-000000000001", "data-c"): 7}, []),
    ],
)
def test_absent_files_are_those_without_a_copy_of_their_size(
    held: dict[tuple[str, str], int], absent: list[str]
) -> None:
    files = [DataFile("data-a", 5), DataFile("data-b", 6), DataFile("../step-000000000001/data-c", 7)]
    assert [file.name for file in absent_files([*files, files[0]], NAME, held)] == absent


@pytest.mark.parametrize(
    ("nbytes", "seconds", "slow"), [(0, 29, False), (0, 31, True), (10**9, 129, False), (10**9, 131, True)]
)
def test_copy_below_ten_megabytes_a_second_is_given_up(nbytes: int, seconds: float, slow: bool) -> None:
    assert is_too_slow(nbytes, seconds) is slow
