"""The records of nodes in Ray, and their beats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.cluster.membership import Member
from millrace.cluster.membership.ray_records import (
    Beats,
    MemberRecord,
    NodeRecord,
    actor_name,
    cluster_name,
    origin_key,
    pause,
)
from millrace.config import resolve
from millrace.errors import DamagedError

_DEFAULT = (Path("/default"),)


def _name(**options: Any) -> str:
    return cluster_name(resolve({"cache_dir": "/default", **options}, environ={}, file={}), _DEFAULT)


def test_cluster_name_ignores_default_directories() -> None:
    here = resolve({"cache_dir": "/mnt/nvme"}, environ={}, file={})
    assert cluster_name(here, (Path("/mnt/nvme"),)) == _name()
    assert cluster_name(here, _DEFAULT) != _name()
    assert cluster_name(here, _DEFAULT) == cluster_name(here, None)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"cluster_token": "a-token-of-ones-own"}, {"cache_dir": "/own"}])
def test_cluster_name_depends_on_shared_options(options: dict[str, Any]) -> None:
    assert _name(**options) == _name(**options) != _name()


@pytest.mark.parametrize("options", [{"capacity": "1GB"}, {"consistency": "immutable"}, {"native": False}])
def test_cluster_name_ignores_options_of_readers(options: dict[str, Any]) -> None:
    assert _name(**options) == _name()


def test_names_contain_no_secret() -> None:
    options = resolve({"cluster_token": "a-token-of-ones-own"}, environ={}, file={})
    cluster = cluster_name(options, None)
    assert "token" not in cluster + actor_name(cluster, options, "f" * 56) + origin_key(cluster, "s3+https://token")


def test_actor_name_depends_on_ray_node_and_directory() -> None:
    one = resolve({"cache_dir": "/one"}, environ={}, file={})
    two = resolve({"cache_dir": "/two"}, environ={}, file={})
    names = [actor_name("c", one, "a" * 56), actor_name("c", one, "b" * 56), actor_name("c", two, "a" * 56)]
    assert len(set(names)) == 3
    assert actor_name("c", one, "a" * 56) == names[0]


def _record(beat: str, *, every: float = 1.0) -> MemberRecord:
    return MemberRecord(member=Member(id="m", address="h:1"), ray_node="r", beat=beat, every=every)


def test_records_round_trip_is_equal() -> None:
    record = _record("7", every=2.5)
    assert MemberRecord.from_bytes(record.to_bytes()) == record
    node = NodeRecord(directory=Path("/d/local.node"), member_id="m")
    assert NodeRecord.from_bytes(node.to_bytes()) == node


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"member": {}}', b"\xff"])
def test_record_that_is_malformed_raises(data: bytes) -> None:
    for kind in (MemberRecord, NodeRecord):
        with pytest.raises(DamagedError):
            kind.from_bytes(data)


def test_member_without_beats_is_late_and_then_over() -> None:
    beats = Beats()
    states = []
    for second in range(9):
        record = _record(str(min(second, 1)))  # the last beat is seen at second 1
        beats.read({"m": record}, float(second))
        states.append((beats.is_late("m", record), beats.is_over("m", record)))
    assert states == [(False, False)] * 4 + [(True, False)] * 4 + [(True, True)]


def test_member_during_an_outage_is_not_late() -> None:
    beats = Beats()
    record = _record("1")
    beats.read({"m": record}, 0.0)
    beats.not_read()
    beats.read({"m": record}, 1000.0)
    assert not beats.is_late("m", record)
    beats.read({"m": record}, 1003.0)
    assert beats.is_late("m", record)


def test_member_with_rare_beats_has_more_time() -> None:
    beats = Beats()
    record = _record("1", every=20.0)
    beats.read({"m": record}, 0.0)
    beats.read({"m": record}, 100.0)
    assert not beats.is_over("m", record)
    beats.read({"m": record}, 102.0)
    assert beats.is_over("m", record)


def test_pause_grows_with_the_members() -> None:
    assert [pause(members, shortest=1.0) for members in (0, 4, 50, 100, 1000)] == [1.0, 1.0, 1.0, 2.0, 20.0]
