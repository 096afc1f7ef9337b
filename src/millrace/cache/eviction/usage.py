"""Accesses to cached objects: noted in the hot path within a few dozen nanoseconds, added up later.

Eviction and the counters both need every read, and neither may slow down a read. So a read only appends to a
queue, and the maintenance of the process adds up its entries twice a second, by *unit*. A unit is evicted as a whole: it is
an object with its own file or a segment of small objects. Small objects that were not kept are units, too.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.store.records import Entry, segment_unit

_MAX_PENDING = 1 << 18  # half a second of opens at the highest rate of one process
_MAX_UNITS = 1 << 18

CHECKPOINT_FILES = (".millrace", ".distcp")
"""The suffixes of the keys of checkpoint files, of Millrace and of torch's own writer. Such files are evicted first."""

FindGroup = Callable[[], str]
"""Returns the data set of an object. Called only when it is not known, so it may use the index."""


class AccessRecord:
    """The record of an object that was opened. Compared by identity: note the same instance again if possible."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry) -> None:
        self.entry = entry


@dataclass(slots=True)
class Tally:
    """The uses of one unit: reads and bytes from this disk (hits), and from elsewhere (misses). `served` of the hits, and
    `served_bytes` of their bytes, were for other nodes, and so were `relayed` of the misses. Of the other misses,
    `peer_reads` had bytes from other nodes.

    `nbytes` is the known size of the unit, `segment` its generation (0: an object with its
    own file, or one that was not kept). `kept`: a part of it is cached. `copy`: another node owns the bytes that were stored
    last (None: nothing was stored, or the group of the segment decides). `joined` are the small objects that were added to
    the segment. `group` is None when it was not known at the access.
    """

    key: bytes
    segment: int
    nbytes: int
    packed_name: bytes
    group: FindGroup | None = None
    hit_bytes: int = 0
    miss_bytes: int = 0
    hits: int = 0
    misses: int = 0
    served: int = 0
    served_bytes: int = 0
    relayed: int = 0
    relayed_bytes: int = 0
    peer_reads: int = 0
    peer_bytes: int = 0
    kept: bool = False
    copy: bool | None = None
    joined: list[bytes] = field(default_factory=list)


_MISSES = ("misses", "miss_bytes", "relayed", "relayed_bytes", "peer_reads", "peer_bytes")


class Read(NamedTuple):
    """Bytes of an object that were read: `times` reads with `nbytes` in total.

    `hit`: the bytes were read from this disk. Otherwise they were fetched, `peer_bytes` of them from other nodes. `kept`:
    they are stored on this disk. `copy`: another node owns them (None: unknown). `served`: the read was for another node.

    Bytes that were counted before they were stored are noted again as kept, with 0 bytes. That is not another read.
    The `entry` of a small object that was not kept may be created for this note; its `place` is 0.
    """

    entry: Entry
    nbytes: int
    hit: bool
    kept: bool
    group: FindGroup | None = None
    copy: bool | None = None
    times: int = 1
    served: bool = False
    peer_bytes: int = 0


class UsageLog:
    """The uses of units by this process since the last `drain`. Thread-safe; no I/O.

    `touched(record)` notes a read of a whole object from a map, and `note(read)` any other read. Neither takes a lock.
    `on_settled(uses, nbytes)` is called with the sums of the reads from maps, each counted once. Readers count the bytes of
    other reads themselves.
    Bounded: of more than 262,144 notes between two settlings the oldest are lost. At most as many units are recorded
    separately between two drains; uses of others are counted, but not returned.
    """

    def __init__(
        self,
        on_settled: Callable[[int, int], None] = lambda uses, nbytes: None,
        *,
        max_pending: int = _MAX_PENDING,
        max_units: int = _MAX_UNITS,
    ) -> None:
        self._pending: deque[AccessRecord] = deque(maxlen=max_pending)
        self._reads: deque[Read] = deque(maxlen=max_pending)
        self._tallies: dict[bytes, Tally] = {}
        self._nbytes = 0
        self._on_settled = on_settled
        self._max_units = max_units
        self._lock = threading.Lock()
        self.touched: Callable[[AccessRecord], None] = self._pending.append
        self.note: Callable[[Read], None] = self._reads.append

    def settle(self) -> int:
        """Add up the accesses that were noted so far. Returns the bytes that `drain` would return."""
        with self._lock:
            self._settle()
            return self._nbytes

    def drain(self) -> list[Tally]:
        """The tallies since the last drain, in the order in which the units were first used."""
        with self._lock:
            self._settle()
            tallies, self._tallies = self._tallies, {}
            self._nbytes = 0
        return list(tallies.values())

    def _settle(self) -> None:
        # Other threads append in the meantime: only the present entries are taken.
        reads = [self._reads.popleft() for _ in range(len(self._reads))]
        counted = Counter([self._pending.popleft() for _ in range(len(self._pending))])
        for read in reads:
            self._add(read)
        uses = nbytes = 0
        for use, count in counted.items():
            size = count * use.entry.size
            uses += count
            nbytes += size
            self._add(Read(use.entry, size, hit=True, kept=True, times=count))
        if uses:
            self._on_settled(uses, nbytes)

    def _add(self, read: Read) -> None:
        self._nbytes += read.nbytes
        entry = read.entry
        key = segment_unit(entry.place) if entry.place else entry.object_id
        tally = self._tallies.get(key)
        if tally is None:
            if len(self._tallies) >= self._max_units:
                return
            tally = self._tallies[key] = Tally(key, entry.place, entry.size, entry.packed_name)
        if entry.place:
            tally.nbytes = max(tally.nbytes, entry.offset + entry.size)
            if not read.hit:
                tally.joined.append(entry.object_id)
                alone = self._tallies.pop(entry.object_id, None)
                for name in _MISSES if alone is not None else ():
                    setattr(tally, name, getattr(tally, name) + getattr(alone, name))
        if read.hit:
            tally.hit_bytes += read.nbytes
            tally.hits += read.times
            if read.served:
                tally.served += read.times
                tally.served_bytes += read.nbytes
        else:
            count = read.times if read.nbytes else 0
            tally.miss_bytes += read.nbytes
            tally.misses += count
            if read.served:
                tally.relayed += count
                tally.relayed_bytes += read.nbytes
            elif read.peer_bytes:
                tally.peer_reads += count
                tally.peer_bytes += read.peer_bytes
        tally.kept = tally.kept or read.kept
        tally.copy = tally.copy if read.copy is None else read.copy
        tally.group = tally.group or read.group


# --- groups ---------------------------------------------------------------------------------------------

_COPIES = " (copies)"
_LEVELS_BELOW_BUCKET = 2


def url_of(origin: str, key: str) -> str:
    """The URL of a key at the origin of this identity."""
    kind = origin.partition("+")[0]
    scheme = kind.removeprefix("fsspec-")
    # With an empty host, for the libraries that read one from a URL.
    return f"{scheme}:///{key}" if scheme != kind else f"{scheme}://{key}"


def group_of(origin_identity: str, key: str, listing_root: str | None = None) -> str:
    """The group of the object `key` of an origin.

    A data set is a listed directory: when `listing_root`, the prefix whose listing named the object, is a directory below
    its bucket, that is the group. Otherwise it is the object's directory, cut two levels below the bucket: deep trees with a
    directory for each class or day must not end up with a segment each.
    """
    directory = key.rpartition("/")[0]
    root = (listing_root or "").rstrip("/")
    if "/" in root.lstrip("/") and (directory == root or directory.startswith(f"{root}/")):
        return f"{origin_identity} {root}"
    levels = directory.split("/")
    # An absolute path begins with an empty level.
    return f"{origin_identity} {'/'.join(levels[: _LEVELS_BELOW_BUCKET + 1 + (levels[0] == '')])}"


def copies_of(group: str) -> str:
    """The group of segments with copies that other nodes own, of the data set `group`."""
    return group + _COPIES


def holds_copies(group: str) -> bool:
    """Whether segments of this group contain copies."""
    return group.endswith(_COPIES)
