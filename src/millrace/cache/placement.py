"""Which disk, or which member, holds an object: weighted rendezvous hashing. Pure.

Every node scores every key, and the highest score owns it. Adding or removing a node moves only its own share, and the
shares follow the weights. The score -weight / ln(hash) is that of Schindelhauer and Schomaker, "Weighted Distributed Hash
Tables" (SPAA 2005); rendezvous hashing is Thaler and Ravishankar's (1998).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import xxhash

_BITS = 52  # so that every hash is a float between 0 and 1, both excluded


def owners(key: bytes, nodes: Iterable[tuple[str, float]]) -> list[str]:
    """The ids of `nodes`, each an (id, weight above 0), in the order in which they own `key`.

    The order depends on the key, the ids and the weights alone, not on the order of `nodes` nor on the process. Where the
    first is gone, the second is the owner.
    """
    return [node for _, node in sorted((-_score(key, node, weight), node) for node, weight in nodes)]


def _score(key: bytes, node: str, weight: float) -> float:
    seed = xxhash.xxh3_64_intdigest(node.encode("utf-8", "surrogatepass"))
    uniform = ((xxhash.xxh3_64_intdigest(key, seed) >> (64 - _BITS)) + 0.5) / (1 << _BITS)
    return -weight / math.log(uniform)
