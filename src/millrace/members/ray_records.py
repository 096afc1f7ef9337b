"""What nodes in a Ray cluster write down in its control plane, and who of them is still there. Pure: no I/O.

Below `<cluster>/` there are `token`, `member/<member id>`, `node/<actor>` and `origin/<digest of the identity>`. The name of
a cluster says which options its nodes share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.config import CacheOptions
from millrace.errors import DamagedError
from millrace.members.protocol import Member

_LEASE_BEATS = 5
_LEASE_MARGIN_SECONDS = 1.0
_LATE_BEATS = 2.0
_MEMBERS_A_SECOND = 50
"""How many members' records each node reads a second: more members are looked at less often."""


def cluster_name(options: CacheOptions, default_dirs: tuple[Path, ...] | None) -> str:
    """The name of the cluster that file systems with `options` are in, the same on every node of a Ray cluster.

    `default_dirs` are this node's cache directories where the options name none: those may differ from node to node. A
    directory that was asked for makes a cache of its own.
    """
    own_dirs = None if options.cache_dirs == default_dirs else [str(path) for path in options.cache_dirs]
    tls = None if options.tls is None else [str(options.tls.cert), str(options.tls.key), str(options.tls.ca)]
    token = None if options.cluster_token is None else _digest("token", options.cluster_token)
    return _digest("cluster", json.dumps([own_dirs, options.replicas, tls, token]))


def actor_name(cluster: str, options: CacheOptions, ray_node: str) -> str:
    """The name of the actor that is the node of this cluster, with these directories, on a Ray node."""
    dirs = _digest("directories", json.dumps([str(path) for path in options.cache_dirs]))
    return f"millrace-node-{ray_node[:16]}-{cluster}-{dirs[:8]}"


def origin_key(cluster: str, identity: str) -> str:
    """Where the access to an origin lies."""
    return f"{cluster}/origin/{_digest('origin', identity)}"


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"millrace {kind} {text}".encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class MemberRecord:
    """A member as it is written down: on which Ray node it is, and a beat that changes every `every` seconds."""

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
        """The reverse; names it does not know are ignored. Raises `DamagedError`."""
        try:
            value = json.loads(data)
            return cls(
                member=Member.from_json(value["member"]),
                ray_node=str(value["ray_node"]),
                beat=str(value["beat"]),
                every=float(value["every"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DamagedError(f"no record of a member: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """What the actor of a Ray node says to the processes there: the name and the path of its folder."""

    folder: str
    directory: Path
    member_id: str

    def to_bytes(self) -> bytes:
        """As JSON."""
        value = {"folder": self.folder, "directory": str(self.directory), "member_id": self.member_id}
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeRecord:
        """The reverse; names it does not know are ignored. Raises `DamagedError`."""
        try:
            value = json.loads(data)
            return cls(
                folder=str(value["folder"]), directory=Path(value["directory"]), member_id=str(value["member_id"])
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DamagedError(f"no record of a node: {error!r}") from error


def pause(members: int, *, shortest: float) -> float:
    """Seconds between two looks at the records of so many members, and between two beats."""
    return max(shortest, members / _MEMBERS_A_SECOND)


@dataclass
class _Silence:
    beat: str
    seconds: float


class Beats:
    """Who still beats, from what was read. Only time in which the control plane answered counts. Not thread-safe."""

    def __init__(self) -> None:
        self._silences: dict[str, _Silence] = {}
        self._last: float | None = None

    def read(self, records: Mapping[str, MemberRecord], now: float) -> None:
        """All records of one look, at a time of `time.monotonic`."""
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        silences = {}
        for name, record in records.items():
            before = self._silences.get(name)
            quiet = before is not None and before.beat == record.beat
            silences[name] = _Silence(record.beat, before.seconds + passed if before is not None and quiet else 0.0)
        self._silences = silences

    def not_read(self) -> None:
        """The control plane did not answer: nobody is silent for that."""
        self._last = None

    def is_late(self, name: str, record: MemberRecord) -> bool:
        """Whether it is time to ask if the member's Ray node lives."""
        return self._silences[name].seconds > _LATE_BEATS * record.every

    def is_over(self, name: str, record: MemberRecord) -> bool:
        """Whether the member has been silent for so long that it is none any more."""
        return self._silences[name].seconds > _LEASE_BEATS * record.every + _LEASE_MARGIN_SECONDS
