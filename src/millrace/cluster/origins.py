"""The origins that a node may read for other members: the given ones, and the one that its environment names.

A peer names an origin by its identity, which contains no secret; the node uses its own access. So a request of a peer can
never make a node open anything else: no local files, no other endpoint, and no web servers, which could be any server in the
node's network.
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
"""Schemes whose endpoint and credentials the environment names. Never local ones, and never `http` or `https`."""

Lookup = Callable[[str], Origin | None]
"""Returns the origin of an identity from another place, such as Ray's control plane. Must not raise; may block."""


class Origins:
    """The origins of a node by their identities. Thread-safe.

    `lookup` is called for identities that are not registered, and again a few seconds after it returned None. With
    `environment`, the S3, Azure, GCS and hub that the environment names, with its credentials, may be read without being
    registered.
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
        """Read this origin for others from now on. Replaces one with the same identity."""
        with self._lock:
            self._known[origin.identity] = origin
            self._unknown.pop(origin.identity, None)

    def find(self, identity: str) -> Origin | None:
        """The origin of this identity; None without access. Never raises."""
        origin = self._known.get(identity) or self._found.get(identity)
        if origin is not None or time.monotonic() < self._unknown.get(identity, 0.0):
            return origin
        origin = self._look_up(identity)
        with self._lock:
            if origin is not None:
                self._found[identity] = origin
            else:
                if len(self._unknown) >= _MAX_UNKNOWN:  # bounded, because peers can invent identities
                    self._unknown.clear()
                self._unknown[identity] = time.monotonic() + _UNKNOWN_SECONDS
        return origin

    def drop(self, identity: str) -> None:
        """Drop an origin that refused its credentials, so that it is looked up again, unless it is registered."""
        with self._lock:
            self._found.pop(identity, None)

    def _look_up(self, identity: str) -> Origin | None:
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
    """An origin without access: uploaded blocks of it can be stored, but nothing can be read."""

    head_is_local = False

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def _refuse(self) -> NoReturn:
        raise DeniedError(
            f"no access to {self.identity} on this node", next_step="name it with 'millrace node run --origin'"
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
