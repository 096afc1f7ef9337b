"""The holders of each stripe of an object: weighted rendezvous hashing over a view of the cluster. Pure.

Every member has a score for every (object, stripe), and the highest score owns it. A member that joins or leaves moves only
its own share, and shares are proportional to the weights. The score -weight / ln(hash) is that of Schindelhauer and
Schomaker, "Weighted Distributed Hash Tables" (SPAA 2005); rendezvous hashing is Thaler and Ravishankar's (1998). The
integers are mixed by the finaliser of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from millrace.cluster.membership import Member, MemberState, View

STRIPE_BYTES = 256 << 20
"""The unit of placement of an object above `WHOLE_BYTES`: small enough to spread it over many nodes."""

WHOLE_BYTES = 1 << 30
"""An object up to this size is on one node as a whole, where it opens natively."""

ORDER_LENGTH = 8
"""The least length of an order, enough for all uses."""

FORMER_LENGTH = 4
"""The number of former holders."""

_CACHED_ORDERS = 8192

_BITS = 52  # so that every hash is a float between 0 and 1, both excluded


def stripe_of(offset: int, size: int) -> int:
    """The stripe of a byte of an object of `size` bytes."""
    return 0 if size <= WHOLE_BYTES else offset // STRIPE_BYTES


def stripe_span(stripe: int, size: int) -> tuple[int, int]:
    """The byte range `[start, stop)` of a stripe."""
    if size <= WHOLE_BYTES:
        return 0, size
    return stripe * STRIPE_BYTES, min((stripe + 1) * STRIPE_BYTES, size)


def stripe_count(size: int) -> int:
    """The number of stripes of an object of `size` bytes; 1 for an empty one."""
    return 1 if size <= WHOLE_BYTES else -(-size // STRIPE_BYTES)


class Placement:
    """The placement by one view, as an immutable value. Thread-safe, and the same on every machine and in every process.

    Equal weights are compared as integers. Others need a logarithm whose last bit may differ between machines. Two machines
    disagree about a stripe with a probability below 1 in 10**12, which would cost a second fetch.
    """

    def __init__(self, view: View, *, replicas: int = 1) -> None:
        self.view = view
        self.replicas = replicas
        here = [member for member in view.members if member.state is MemberState.HERE]
        owning = here or [member for member in view.members if member.state is MemberState.JOINING]
        known = [member for member in view.members if member.state is not MemberState.JOINING]
        self.shares = frozenset((member.id, member.weight) for member in owning)
        cached = lru_cache(_CACHED_ORDERS)  # a reader requests the same stripe repeatedly
        self._order = cached(_Ranking(owning, max(ORDER_LENGTH, replicas)))
        # While no member leaves, both rankings are equal.
        self._former = self._order if known == owning else cached(_Ranking(known, FORMER_LENGTH))

    def order(self, object_id: bytes, stripe: int = 0) -> tuple[Member, ...]:
        """The members in the order in which they own a stripe, at most 8 (or `replicas`).

        Leaving and joining members own nothing, but joining ones count while no member is `here`.
        """
        return self._order(object_id, stripe)

    def holders(self, object_id: bytes, stripe: int = 0) -> tuple[Member, ...]:
        """The holders of a stripe: the owner first, then those of the replicas."""
        return self._order(object_id, stripe)[: self.replicas]

    def former(self, object_id: bytes, stripe: int = 0) -> tuple[Member, ...]:
        """At most 4 former holders of a stripe: the first by the order of all members, including leaving ones, without
        joining ones.
        """
        return self._former(object_id, stripe)[:FORMER_LENGTH]

    def is_holder(self, member_id: str, object_id: bytes, stripe: int = 0) -> bool:
        """Whether a member is a holder of a stripe."""
        return any(member.id == member_id for member in self.holders(object_id, stripe))

    def stripes_of(self, member_id: str, object_id: bytes, size: int) -> list[int]:
        """The stripes of an object of `size` bytes whose holders include a member."""
        return [stripe for stripe in range(stripe_count(size)) if self.is_holder(member_id, object_id, stripe)]


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
        # With equal weights the order of the scores is that of the hashes.
        scores = -self._weights / np.log((bits + 0.5) / (1 << _BITS)) if self._weighted else bits
        first: Sequence[int] | npt.NDArray[np.int64] = range(len(scores))
        if len(scores) > 4 * self._length:
            first = np.argpartition(scores, len(scores) - self._length)[-self._length :]
        ranked = sorted((-score, place) for score, place in zip(scores[first].tolist(), map(int, first), strict=True))
        return tuple(self._members[place] for _, place in ranked[: self._length])


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits, so that one differing bit changes all. Arithmetic modulo 2**64, independent of the byte order."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
