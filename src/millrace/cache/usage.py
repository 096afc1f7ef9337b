"""Who was read how often: noted in the hot path for a few dozen nanoseconds, added up later.

Eviction and the counters both want to know of every read; neither may cost the read anything. So a read only appends to a
queue, and the process's housekeeping adds up what is in it twice a second, by *unit*: what is evicted as a whole, which is
an object with a file of its own or a segment of small objects. Small objects that were not kept are units by themselves.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.cache.records import Entry, segment_unit

_MAX_PENDING = 1 << 18  # half a second of opening at the highest rate that one process reaches
_MAX_UNITS = 1 << 18

FindGroup = Callable[[], str]
"""Says which data set an object belongs to. Asked only where that is not known, so it may look things up."""


class Use:
    """What is noted: the record of an object that was opened. Told apart by identity: note the same one again if you can."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry) -> None:
        self.entry = entry


@dataclass(slots=True)
class Tally:
    """The uses of one unit: bytes that were given out from here, and bytes that came from the origin.

    `nbytes` is the size of the unit as far as it is known here, `segment` its generation (0: an object with a file of its
    own, or one that was not kept). `kept` says that something of it is here, and `copy` whether what was kept last is
    another node's (None: nothing was, or the segment's group says it). `joined` are the small objects that came into the
    segment. `group` is None where whoever noted the use does not know it.
    """

    key: bytes
    segment: int
    nbytes: int
    packed_name: bytes
    group: FindGroup | None = None
    hit_bytes: int = 0
    miss_bytes: int = 0
    kept: bool = False
    copy: bool | None = None
    joined: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Read:
    """Some bytes of an object that were not given out as a whole from a map."""

    entry: Entry
    nbytes: int
    hit: bool
    kept: bool
    group: FindGroup | None
    copy: bool | None = None


class UsageLog:
    """The uses of units by this process since the last `drain`. Thread-safe; no I/O.

    `touched(use)` notes that all of an object was given out, and takes no lock. `on_settled(uses, nbytes)` hears of those,
    each once; bytes of the other kinds are counted by who reads them.
    Bounded: of more than 262,144 notes between two settlings the oldest are lost, and no more units than that are told
    apart between two drains (uses of others are counted, but not handed out).
    """

    def __init__(
        self,
        on_settled: Callable[[int, int], None] = lambda uses, nbytes: None,
        *,
        max_pending: int = _MAX_PENDING,
        max_units: int = _MAX_UNITS,
    ) -> None:
        self._pending: deque[Use] = deque(maxlen=max_pending)
        self._reads: deque[_Read] = deque(maxlen=max_pending)
        self._tallies: dict[bytes, Tally] = {}
        self._nbytes = 0
        self._on_settled = on_settled
        self._max_units = max_units
        self._lock = threading.Lock()
        self.touched: Callable[[Use], None] = self._pending.append

    def hit(self, entry: Entry, nbytes: int, group: FindGroup | None = None) -> None:
        """Note that `nbytes` of an object were given out from this disk."""
        self._reads.append(_Read(entry, nbytes, True, True, group))

    def missed(
        self, entry: Entry, nbytes: int, group: FindGroup | None = None, *, kept: bool, copy: bool | None = None
    ) -> None:
        """Note that `nbytes` of an object came from elsewhere, and whether they were kept, as a copy or not.

        Of a small object that was not kept the record may be made up; its `place` is 0.
        """
        self._reads.append(_Read(entry, nbytes, False, kept, group, copy))

    def settle(self) -> int:
        """Add up what was noted so far; gives the bytes that `drain` would hand out."""
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
        # Others append meanwhile: what is here now is taken, no more.
        reads = [self._reads.popleft() for _ in range(len(self._reads))]
        counted = Counter([self._pending.popleft() for _ in range(len(self._pending))])
        for read in reads:
            self._add(read)
        uses = nbytes = 0
        for use, count in counted.items():
            size = count * use.entry.size
            uses += count
            nbytes += size
            self._add(_Read(use.entry, size, True, True, None))
        if uses:
            self._on_settled(uses, nbytes)

    def _add(self, read: _Read) -> None:
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
                tally.miss_bytes += 0 if alone is None else alone.miss_bytes
        if read.hit:
            tally.hit_bytes += read.nbytes
        else:
            tally.miss_bytes += read.nbytes
        tally.kept = tally.kept or read.kept
        tally.copy = tally.copy if read.copy is None else read.copy
        tally.group = tally.group or read.group
