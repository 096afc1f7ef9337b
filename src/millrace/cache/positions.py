"""Keys in the order of their origin, and moments at which it was asked. No I/O."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from millrace.cache.pages import encode

END = "\U0010ffff"
"""Sorts after everything that a key may continue with."""


@dataclass(frozen=True, slots=True)
class Space:
    """The keys of one origin in its order, or one level of a directory's listing in ours."""

    digest: bytes
    folders_first: bool = False

    def position(self, key: str) -> str:
        """Where `key` sorts."""
        return key.replace("/", "\0") if self.folders_first else key

    def key(self, position: str) -> str:
        """The reverse of `position`."""
        return position.replace("\0", "/") if self.folders_first else position


@dataclass(frozen=True, slots=True)
class Moment:
    """When the origin was asked: the time, and the number of the last change that was known by then."""

    asked: float
    changes: int

    def earlier(self, seconds: float) -> Moment:
        """The moment, of an answer that was so old when it came."""
        return self if not seconds else Moment(self.asked - seconds, self.changes)


def digest_of(*parts: str) -> bytes:
    return hashlib.blake2b(encode("\0".join(parts)), digest_size=8).digest()


def level_space(identity: str, base: str) -> Space:
    """The space of one level: what lies directly below the directory `base` (with its slash); prefixes end in a slash."""
    return Space(digest_of("level", identity, base))
