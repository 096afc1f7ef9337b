"""Which origins a node may read for others: those it was given, and the one that its environment names.

A peer names an origin by its identity, which holds no secret; access to it is the node's own. So what a peer says can never
make a node open anything that nobody gave it: no local files, no other endpoint, and no web servers, since whoever may name
any of them has the node's place in the network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from typing_extensions import Buffer

from millrace.errors import DeniedError, MillraceError
from millrace.events import Event, emit
from millrace.origin import Listing, ListingPage, ObjectInfo, ObjectWriter, Origin, open_origin

_UNKNOWN_SECONDS = 5.0
_MAX_UNKNOWN = 1000

_OF_THE_ENVIRONMENT = frozenset({"s3", "az", "gs", "hf"})
"""Schemes whose endpoint and credentials the environment names. Never what is local, and never `http` or `https`."""

Lookup = Callable[[str], Origin | None]
"""Finds the origin of an identity elsewhere, such as in Ray's control plane. Must not raise; may take a moment."""


class Origins:
    """The origins of a node by their identities. Thread-safe.

    `lookup` is asked for what was not registered, and again a few seconds later for what it did not know. `environment`
    says whether the S3, Azure, GCS and hub that the environment names, with its credentials, may be read although nobody
    registered them.
    """

    def __init__(self, given: Iterable[Origin] = (), *, lookup: Lookup | None = None, environment: bool = True) -> None:
        self._known: dict[str, Origin] = {}
        self._found: dict[str, Origin] = {}
        self._unknown: dict[str, float] = {}
        self._environment = environment
        self._lock = threading.Lock()
        self.lookup = lookup
        for origin in given:
            self.register(origin)

    def register(self, origin: Origin) -> None:
        """Read this origin for others from now on, in place of one with the same identity."""
        with self._lock:
            self._known[origin.identity] = origin
            self._unknown.pop(origin.identity, None)

    def find(self, identity: str) -> Origin | None:
        """The origin of this identity; None where this node has no access. Never raises."""
        origin = self._known.get(identity) or self._found.get(identity)
        if origin is not None or time.monotonic() < self._unknown.get(identity, 0.0):
            return origin
        origin = self._look_for(identity)
        with self._lock:
            if origin is not None:
                self._found[identity] = origin
            else:
                if len(self._unknown) >= _MAX_UNKNOWN:  # whoever makes up identities gets no memory for them
                    self._unknown.clear()
                self._unknown[identity] = time.monotonic() + _UNKNOWN_SECONDS
        return origin

    def forget(self, identity: str) -> None:
        """After an origin refused the credentials: look for others the next time, unless it was registered."""
        with self._lock:
            self._found.pop(identity, None)

    def identities(self) -> list[str]:
        """Those that are known now."""
        return sorted({*self._known, *self._found})

    def _look_for(self, identity: str) -> Origin | None:
        if self.lookup is not None and (origin := self.lookup(identity)) is not None:
            return origin
        scheme = identity.partition("+")[0]
        if self._environment and scheme in _OF_THE_ENVIRONMENT:
            try:
                default = open_origin(scheme)
            except MillraceError as error:
                emit(Event(name="peer.origin.unusable", subject=identity, detail=str(error)))
                return None
            return default if default.identity == identity else None
        return None


class NamedOrigin:
    """An origin that this node knows only by name: what others bring of it can be kept, and nothing can be read."""

    head_is_local = False

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def _refuse(self) -> NoReturn:
        raise DeniedError(
            f"this node has no access to {self.identity}", next_step="name it with 'millrace node run --origin'"
        )

    def is_immutable(self, key: str) -> bool:
        return False

    def head(self, key: str) -> ObjectInfo:
        self._refuse()

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        self._refuse()

    def list_level(self, prefix: str) -> Listing:
        self._refuse()

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        self._refuse()

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        self._refuse()

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._refuse()

    def open_writer(self, key: str) -> ObjectWriter:
        self._refuse()

    def delete(self, keys: Sequence[str]) -> None:
        self._refuse()
