"""Which member holds a stripe of an object: weighted rendezvous hashing over a view of the cluster. Pure.

Every member scores every (object, stripe), and the highest score owns it: a member that comes or goes moves only its own
share, and shares follow the weights. The score -weight / ln(hash) is that of Schindelhauer and Schomaker, "Weighted
Distributed Hash Tables" (SPAA 2005); rendezvous hashing is Thaler and Ravishankar's (1998). The integers are mixed by the
finaliser of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from millrace.members import Member, MemberState, View

STRIPE_BYTES = 256 << 20
"""The unit of placement of an object above `WHOLE_BYTES`: small enough to spread it over many nodes."""

WHOLE_BYTES = 1 << 30
"""An object up to this size lies on one node as a whole, where it opens natively."""

ORDER_LENGTH = 8
"""So many members of an order are told at least; nobody asks more of them."""

FORMER_LENGTH = 4
"""So many of those that may have had a stripe before are told."""

_CACHED_ORDERS = 8192

_BITS = 52  # so that every hash is a float between 0 and 1, both excluded


def stripe_of(offset: int, size: int) -> int:
    """The stripe that a byte of an object of `size` bytes lies in."""
    return 0 if size <= WHOLE_BYTES else offset // STRIPE_BYTES


def stripe_span(stripe: int, size: int) -> tuple[int, int]:
    """The byte range `[start, stop)` of a stripe."""
    if size <= WHOLE_BYTES:
        return 0, size
    return stripe * STRIPE_BYTES, min((stripe + 1) * STRIPE_BYTES, size)


def stripe_count(size: int) -> int:
    """How many stripes an object of `size` bytes has; 1 for an empty one."""
    return 1 if size <= WHOLE_BYTES else -(-size // STRIPE_BYTES)


class Placement:
    """Who holds what by one view, as an immutable value. Thread-safe, and the same on every machine and in every process.

    Equal weights are compared as integers. Others go through a logarithm whose last bit may differ from one machine to the
    next: that two of them disagree about a stripe is less likely than 1 in 10**12 and would cost a second fetch.
    """

    def __init__(self, view: View, *, replicas: int = 1) -> None:
        self.view = view
        self.replicas = replicas
        here = [member for member in view.members if member.state is MemberState.HERE]
        owning = here or [member for member in view.members if member.state is MemberState.JOINING]
        known = [member for member in view.members if member.state is not MemberState.JOINING]
        self._order = _remembered(_Ranking(owning, max(ORDER_LENGTH, replicas)))
        # Where nobody leaves the two rankings are one.
        self._former = self._order if known == owning else _remembered(_Ranking(known, FORMER_LENGTH))

    def order(self, object_id: bytes, stripe: int = 0) -> tuple[Member, ...]:
        """The members in the order in which they own a stripe, at most 8 (or `replicas`).

        Those that leave or join own nothing; but while nobody is `here` those that are joining count.
        """
        return self._order(object_id, stripe)

    def holders(self, object_id: bytes, stripe: int = 0) -> tuple[Member, ...]:
        """The members that are to have a stripe: the owner first, then those with the replicas."""
        return self._order(object_id, stripe)[: self.replicas]

    def former(self, object_id: bytes, stripe: int = 0) -> tuple[Member, ...]:
        """At most 4 members that may have a stripe from before: the first of all, those that leave included, without those
        that join.
        """
        return self._former(object_id, stripe)[:FORMER_LENGTH]

    def is_holder(self, member_id: str, object_id: bytes, stripe: int = 0) -> bool:
        """Whether a member is to have a stripe."""
        return any(member.id == member_id for member in self.holders(object_id, stripe))


_Order = Callable[[bytes, int], tuple[Member, ...]]


class _Ranking:
    """The order of some members for any stripe: the first `length` of them."""

    def __init__(self, members: Sequence[Member], length: int) -> None:
        self._members = members
        self._length = length
        hashes = [xxhash.xxh3_64_intdigest(member.id.encode("utf-8", "surrogatepass")) for member in members]
        self._hashes = np.array(hashes, dtype=np.uint64)
        self._weights = np.array([member.weight for member in members], dtype=np.float64)
        self._weighted = len({member.weight for member in members}) > 1

    def __call__(self, object_id: bytes, stripe: int) -> tuple[Member, ...]:
        if len(self._members) < 2:
            return tuple(self._members)
        key = xxhash.xxh3_64_intdigest(object_id + stripe.to_bytes(8, "little"))
        bits = _mixed(self._hashes ^ np.uint64(key)) >> np.uint64(64 - _BITS)
        # With equal weights the score grows with the hash: the hash is as good.
        scores = -self._weights / np.log((bits + 0.5) / (1 << _BITS)) if self._weighted else bits
        first: Sequence[int] | npt.NDArray[np.int64] = range(len(scores))
        if len(scores) > 4 * self._length:
            first = np.argpartition(scores, len(scores) - self._length)[-self._length :]
        ranked = sorted((-score, place) for score, place in zip(scores[first].tolist(), map(int, first), strict=True))
        return tuple(self._members[place] for _, place in ranked[: self._length])


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread what differs in one bit over all bits. Arithmetic modulo 2**64, whatever the byte order of the machine."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _remembered(ranking: _Ranking) -> _Order:
    """The same with its latest answers at hand: a reader asks for the same stripe again and again."""
    known: dict[tuple[bytes, int], tuple[Member, ...]] = {}

    def order(object_id: bytes, stripe: int) -> tuple[Member, ...]:
        found = known.get((object_id, stripe))
        if found is None:
            if len(known) >= _CACHED_ORDERS:
                known.clear()
            found = known[object_id, stripe] = ranking(object_id, stripe)
        return found

    return order
