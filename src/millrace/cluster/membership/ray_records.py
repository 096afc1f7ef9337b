"""The records of nodes in a Ray cluster's control plane, and which of the nodes still write theirs. Pure: no I/O.

The keys below `<cluster>/` are `token`, `member/<member id>`, `node/<actor>` and `origin/<digest of the identity>`. The name
of a cluster is a digest of the options that its nodes share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.cluster.membership.protocol import Member
from millrace.config import CacheOptions
from millrace.errors import DamagedError

_LEASE_BEATS = 5
_LEASE_MARGIN_SECONDS = 1.0
_LATE_BEATS = 2.0
_MEMBERS_A_SECOND = 50
"""Records that each node reads per second: the more members, the longer the interval."""


def cluster_name(options: CacheOptions, default_dirs: tuple[Path, ...] | None) -> str:
    """The name of the cluster of file systems with `options`, the same on every node of a Ray cluster.

    `default_dirs` are this node's default cache directories, which may differ from node to node. Explicit directories form a
    cluster of their own.
    """
    own_dirs = None if options.cache_dirs == default_dirs else [str(path) for path in options.cache_dirs]
    tls = None if options.tls is None else [str(options.tls.cert), str(options.tls.key), str(options.tls.ca)]
    token = None if options.cluster_token is None else _digest("token", options.cluster_token)
    return _digest("cluster", json.dumps([own_dirs, options.replicas, tls, token]))


def actor_name(cluster: str, options: CacheOptions, ray_node: str) -> str:
    """The name of the actor of this cluster, with these directories, on a Ray node."""
    dirs = _digest("directories", json.dumps([str(path) for path in options.cache_dirs]))
    return f"millrace-node-{ray_node[:16]}-{cluster}-{dirs[:8]}"


def origin_key(cluster: str, identity: str) -> str:
    """The key of the access to an origin."""
    return f"{cluster}/origin/{_digest('origin', identity)}"


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"millrace {kind} {text}".encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class MemberRecord:
    """The record of a member: its Ray node, and a beat that changes every `every` seconds."""

    member: Member
    ray_node: str
    beat: str
    every: float

    def to_bytes(self) -> bytes:
        """As JSON."""
        value = {
            "member": self.member.to_json(),
            "ray_node": self.ray_node,
            "beat": self.beat,
            "every": self.every,
        }
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MemberRecord:
        """The reverse; ignores unknown names. Raises `DamagedError`."""
        try:
            value = json.loads(data)
            return cls(
                member=Member.from_json(value["member"]),
                ray_node=str(value["ray_node"]),
                beat=str(value["beat"]),
                every=float(value["every"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DamagedError(f"not the record of a member: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """The record of a Ray node's actor for the processes there: the folder and the member id of its node."""

    directory: Path
    member_id: str

    def to_bytes(self) -> bytes:
        """As JSON."""
        value = {"directory": str(self.directory), "member_id": self.member_id}
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeRecord:
        """The reverse; ignores unknown names. Raises `DamagedError`."""
        try:
            value = json.loads(data)
            return cls(directory=Path(value["directory"]), member_id=str(value["member_id"]))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DamagedError(f"not the record of a node: {error!r}") from error


def pause(members: int, *, shortest: float) -> float:
    """Seconds between two reads of the records of `members` members, and between two beats."""
    return max(shortest, members / _MEMBERS_A_SECOND)


def shortest_lease(record: MemberRecord) -> float:
    """The seconds after a beat in which no other process regards the member as gone."""
    return _LEASE_BEATS * record.every


@dataclass
class _Silence:
    beat: str
    seconds: float


class Beats:
    """How long each member has not changed its beat, without outages of the control plane. Not thread-safe."""

    def __init__(self) -> None:
        self._silences: dict[str, _Silence] = {}
        self._last: float | None = None

    def read(self, records: Mapping[str, MemberRecord], now: float) -> None:
        """Add all records of one read, at `now` (`time.monotonic`)."""
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        silences = {}
        for name, record in records.items():
            before = self._silences.get(name)
            quiet = before is not None and before.beat == record.beat
            silences[name] = _Silence(record.beat, before.seconds + passed if before is not None and quiet else 0.0)
        self._silences = silences

    def not_read(self) -> None:
        """The control plane did not respond: this time does not count."""
        self._last = None

    def is_late(self, name: str, record: MemberRecord) -> bool:
        """Whether to check that the member's Ray node lives."""
        return self._silences[name].seconds > _LATE_BEATS * record.every

    def is_over(self, name: str, record: MemberRecord) -> bool:
        """Whether the member counts as gone."""
        return self._silences[name].seconds > _LEASE_BEATS * record.every + _LEASE_MARGIN_SECONDS
