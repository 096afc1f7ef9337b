"""What nodes in Ray write down, and who of them still beats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.config import resolve
from millrace.errors import DamagedError
from millrace.members import Member
from millrace.members.ray_records import Beats, MemberRecord, NodeRecord, actor_name, cluster_name, origin_key, pause

_DEFAULT = (Path("/default"),)


def _name(**options: Any) -> str:
    return cluster_name(resolve({"cache_dir": "/default", **options}, environ={}, file={}), _DEFAULT)


def test_nodes_with_other_directories_by_default_are_in_one_cluster() -> None:
    here = resolve({"cache_dir": "/mnt/nvme"}, environ={}, file={})
    assert cluster_name(here, (Path("/mnt/nvme"),)) == _name()
    assert cluster_name(here, _DEFAULT) != _name()
    assert cluster_name(here, _DEFAULT) == cluster_name(here, None)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"cluster_token": "a-token-of-ones-own"}, {"cache_dir": "/own"}])
def test_what_nodes_must_share_makes_another_cluster(options: dict[str, Any]) -> None:
    assert _name(**options) == _name(**options) != _name()


@pytest.mark.parametrize("options", [{"capacity": "1GB"}, {"consistency": "immutable"}, {"native": False}])
def test_what_each_reader_may_choose_does_not(options: dict[str, Any]) -> None:
    assert _name(**options) == _name()


def test_no_name_tells_a_secret() -> None:
    options = resolve({"cluster_token": "a-token-of-ones-own"}, environ={}, file={})
    cluster = cluster_name(options, None)
    assert "token" not in cluster + actor_name(cluster, options, "f" * 56) + origin_key(cluster, "s3+https://token")


def test_actors_are_one_a_ray_node_and_directory() -> None:
    one = resolve({"cache_dir": "/one"}, environ={}, file={})
    two = resolve({"cache_dir": "/two"}, environ={}, file={})
    names = [actor_name("c", one, "a" * 56), actor_name("c", one, "b" * 56), actor_name("c", two, "a" * 56)]
    assert len(set(names)) == 3
    assert actor_name("c", one, "a" * 56) == names[0]


def _record(beat: str, *, every: float = 1.0) -> MemberRecord:
    return MemberRecord(member=Member(id="m", address="h:1"), ray_node="r", beat=beat, every=every)


def test_records_survive_the_way_there_and_back() -> None:
    record = _record("7", every=2.5)
    assert MemberRecord.from_bytes(record.to_bytes()) == record
    node = NodeRecord(folder="local", directory=Path("/d/local.node"), member_id="m")
    assert NodeRecord.from_bytes(node.to_bytes()) == node


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"member": {}}', b"\xff"])
def test_what_is_no_record_is_told(data: bytes) -> None:
    for kind in (MemberRecord, NodeRecord):
        with pytest.raises(DamagedError):
            kind.from_bytes(data)


def test_who_stops_to_beat_is_late_and_then_over() -> None:
    beats = Beats()
    states = []
    for second in range(9):
        record = _record(str(min(second, 1)))  # the last beat is seen at second 1
        beats.read({"m": record}, float(second))
        states.append((beats.is_late("m", record), beats.is_over("m", record)))
    assert states == [(False, False)] * 4 + [(True, False)] * 4 + [(True, True)]


def test_time_without_answers_does_not_count() -> None:
    beats = Beats()
    record = _record("1")
    beats.read({"m": record}, 0.0)
    beats.not_read()
    beats.read({"m": record}, 1000.0)
    assert not beats.is_late("m", record)
    beats.read({"m": record}, 1003.0)
    assert beats.is_late("m", record)


def test_who_beats_rarely_is_given_more_time() -> None:
    beats = Beats()
    record = _record("1", every=20.0)
    beats.read({"m": record}, 0.0)
    beats.read({"m": record}, 100.0)
    assert not beats.is_over("m", record)
    beats.read({"m": record}, 102.0)
    assert beats.is_over("m", record)


def test_more_members_are_looked_at_less_often() -> None:
    assert [pause(members, shortest=1.0) for members in (0, 4, 50, 100, 1000)] == [1.0, 1.0, 1.0, 2.0, 20.0]
