"""Metadata in a cluster: one member requests a bucket's metadata from the origin, and serves it to the others.

A bucket's *metadata owner* is the placement's owner of a digest of origin and bucket. A process that misses a page of a
listing, a level or the metadata of an object requests it from the owner, from the next in the order if the owner does not
respond, and then from the origin. The owner serves cached metadata up to half the requester's max age. The requester counts
the other half as the age of each response. So no metadata is used beyond the option `consistency`, without comparing clocks.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard, TypeVar

from millrace.cache.metadata.metadata import ORIGIN_METADATA
from millrace.cache.metadata.pages import Space
from millrace.cache.metadata.sources import ListingPart, base_of, end_of
from millrace.cache.node import CacheNode
from millrace.cluster.breakers import boot_seconds
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.server import Call, PlaneServer
from millrace.cluster.invalidation import FORGET, Invalidations, record_failure
from millrace.cluster.membership import Member
from millrace.cluster.origins import NamedOrigin, Origins
from millrace.cluster.placement import Placement
from millrace.config import SILENCE_SECONDS
from millrace.errors import (
    MissingError,
    ObjectNotFoundError,
    OriginUnavailableError,
    PeerError,
    PeerRefusedError,
    PeerSilentError,
    UsageError,
)
from millrace.events import Event, emit
from millrace.origin import Listing, ListingPage, ObjectInfo, Origin

_T = TypeVar("_T")

_OWNERS = 2
_OPEN_LISTINGS = 64  # that a metadata owner keeps to continue
_PAGES_AHEAD = 5  # that one response of an origin contains at most: those of Azure have 5,000 keys
_MOST_STALE = 1000  # directories
_LARGEST = 1 << 60  # bytes of an object
_NOT_FOUND = (MissingError.code, ObjectNotFoundError.code)  # responses of an owner that works normally

LISTING, LEVEL, HEAD = "/v1/listing", "/v1/level", "/v1/head"


def metadata_id(identity: str, key: str) -> bytes:
    """The id under which placement assigns the metadata of a key's bucket."""
    bucket = key.lstrip("/").partition("/")[0]
    text = f"metadata\0{identity}\0{bucket}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _owners(placement: Placement, identity: str, key: str) -> Sequence[Member]:
    """The metadata owners of a key's bucket, in the order of requests."""
    return placement.order(metadata_id(identity, key))[:_OWNERS]


class ClusterListings:
    """The metadata source of a process in a cluster (a `MetadataSource`). Thread-safe.

    `max_age_seconds` is the option `consistency` of the process.
    """

    def __init__(self, cluster: Cluster, max_age_seconds: float) -> None:
        self._cluster = cluster
        self._invalidations = Invalidations(cluster)
        # Immutable metadata has no age.
        self._age = 0.0 if max_age_seconds == math.inf else max_age_seconds / 2
        self._max_age = max_age_seconds
        self._uses_peers = max_age_seconds > 0
        self._stale: dict[tuple[str, str], float] = {}
        self._limit = "inf" if max_age_seconds == math.inf else repr(self._age)

    def head(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        info = self._request(origin, key, HEAD, {"key": key}, partial(_info_of, key))
        return ORIGIN_METADATA.head(origin, key) if info is None else (info, self._age)

    def list_level(self, origin: Origin, prefix: str) -> tuple[Listing, float]:
        level = self._request(origin, prefix, LEVEL, {"prefix": prefix}, partial(_listing_of, prefix))
        return ORIGIN_METADATA.list_level(origin, prefix) if level is None else (level, self._age)

    def list_pages(
        self, origin: Origin, prefix: str, *, after: str, settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[tuple[ListingPage, float]]:
        progress, last = _ListingProgress(prefix, after), after
        while True:
            query = {"prefix": prefix, "after": progress.through}
            page = self._request(origin, prefix, LISTING, query, progress.take)
            if page is None:
                # Behind a key: an owner's page may end where a directory begins, where origins do not continue.
                yield from ORIGIN_METADATA.list_pages(origin, prefix, after=last, settled=settled)
                return
            last = page.objects[-1].key if page.objects else last
            yield ListingPage(page.objects, progress.is_over, page.is_directory), self._age
            if progress.is_over:
                return

    def changed(self, origin: Origin, keys: Sequence[str]) -> bool:
        if origin.head_is_local or not keys:
            return False
        by_bucket = {key.lstrip("/").partition("/")[0]: key for key in keys}

        def owners(placement: Placement) -> list[Member]:
            orders = [_owners(placement, origin.identity, key) for key in by_bucket.values()]
            # First owners before second ones, because second owners send requests to first ones.
            ranks = itertools.zip_longest(*orders)
            return list({member.id: member for rank in ranks for member in rank if member is not None}.values())

        first = [member.id for member in owners(self._cluster.placement())]
        missed = self._invalidations.send(origin.identity, keys, owners)
        if self._uses_peers and not missed.isdisjoint(first):
            # An owner may return with old metadata: this process reads the metadata of its own writes from the origin.
            for key in keys:
                self._mark_stale(origin.identity, key)
        # This machine's node is invalidated like all others. A client has no node that its readers share.
        me = self._cluster.link.member_id
        return bool(first) and (me is None or me in missed)

    def _request(
        self, origin: Origin, key: str, path: str, query: Mapping[str, str], read: Callable[[Any], _T]
    ) -> _T | None:
        """The response of a metadata owner; None if this node is the owner, or no owner responds: then read the origin."""
        if not self._uses_peers or origin.head_is_local:
            return None
        me = self._cluster.link.member_id
        if self._stale and self._is_stale(origin.identity, key):
            return None
        arguments = {"origin": origin.identity, "age": self._limit, **query}
        for member in _owners(self._cluster.placement(), origin.identity, key):
            if member.id == me:
                return None
            if not self._cluster.is_available(member):
                continue
            try:
                response = self._cluster.client.call(
                    member.address, "GET", path, query=arguments, deadline=SILENCE_SECONDS
                )
                self._cluster.breakers.worked(member.id)
                return read(response)
            except PeerError as error:
                if isinstance(error, PeerRefusedError) and error.reason in _NOT_FOUND:
                    self._cluster.breakers.worked(member.id)
                else:
                    record_failure(self._cluster, member, error)
                if not isinstance(error, PeerSilentError):
                    return None  # the origin's own error is the one to raise
            except (KeyError, TypeError, ValueError, OverflowError):
                emit(Event(name="peer.refused", subject=member.address, detail="its response is invalid"))
                return None
        return None

    def _mark_stale(self, identity: str, key: str) -> None:
        """Read metadata below the directory of `key` from the origin, while owners may serve older metadata."""
        if len(self._stale) >= _MOST_STALE:
            self._stale.clear()
            key = ""  # its directory contains all
        self._stale[identity, key[: key.rfind("/") + 1]] = time.monotonic() + self._max_age

    def _is_stale(self, identity: str, key: str) -> bool:
        """Whether an owner's response about `key`, or keys below it, may lack a write of this process."""
        now = time.monotonic()
        for (of, directory), until in list(self._stale.items()):
            if until < now:
                self._stale.pop((of, directory), None)
            elif of == identity and (key.startswith(directory) or directory.startswith(_base_of(key))):
                return True
        return False


class MetadataOwner:
    """Serves this node's cached metadata to other members. Thread-safe.

    Drops the keys that other members invalidate, and invalidates them later on members that were not reachable.
    It serves no metadata from before its creation, or the last `expire_all`: it may have missed invalidations. If
    `record_alive` is called every second, that includes pauses of the process, during which writers skip it. When the
    number of `absences` has changed (`Membership.absences`), writers may not have had it in their view.
    """

    def __init__(
        self, node: CacheNode, origins: Origins, invalidations: Invalidations, absences: Callable[[], int] = lambda: 0
    ) -> None:
        self._node = node
        self._origins = origins
        self._invalidations = invalidations
        self._open: OrderedDict[tuple[str, str, str, str], tuple[float, Iterator[ListingPart]]] = OrderedDict()
        """Listings to continue, each with the time (monotonic) before its last page was requested."""
        self._invalidated = 0  # number of invalidations
        self._since = time.time()
        self._alive_at = math.inf  # seconds of the machine's clock
        self._absences = absences
        self._known_absences = 0
        self._lock = threading.Lock()

    def add_routes(self, server: PlaneServer) -> None:
        """Register the requests at `server`."""
        server.route("GET", LISTING, self._listing)
        server.route("GET", LEVEL, self._level)
        server.route("GET", HEAD, self._head)
        server.route("POST", FORGET, self._forget)

    def expire_all(self) -> None:
        """Serve no metadata from before now. Cached metadata stays, for this node's own readers."""
        with self._lock:
            self._since = time.time()
            self._invalidated += 1
            self._open.clear()

    def record_alive(self) -> None:
        """Record that this process runs."""
        self._expire_after_absence()
        self._alive_at = boot_seconds()

    def _expire_after_absence(self) -> None:
        absences = self._absences()
        if absences != self._known_absences or boot_seconds() - self._alive_at >= SILENCE_SECONDS:
            self.expire_all()
            self._known_absences = absences

    def _listing(self, call: Call) -> Any:
        origin, age = self._arguments(call)
        prefix, after = _text(call.query, "prefix"), _text(call.query, "after")
        name = origin.identity, prefix, call.query["age"], after
        with self._lock:
            invalidated = self._invalidated
            last, parts = self._open.pop(name, (-math.inf, None))
        now = time.monotonic()
        # Its next pages may have arrived with earlier ones.
        if parts is None or now - last > age / _PAGES_AHEAD:
            parts = self._node.metadata_within(age, self._since).parts(origin, prefix, after)
        part = next(parts, None)
        if part is None:
            part = ListingPart([], end_of(prefix))
        if part.through != end_of(prefix):
            with self._lock:
                if invalidated == self._invalidated:  # else its next page may be prefetched and old
                    self._open[(*name[:3], part.through)] = now, parts
                while len(self._open) > _OPEN_LISTINGS:
                    self._open.popitem(last=False)
        return {
            "objects": [_row(info) for info in part.objects],
            "through": part.through,
            "is_directory": part.is_directory,
        }

    def _level(self, call: Call) -> Any:
        origin, age = self._arguments(call)
        listing = self._node.metadata_within(age, self._since).list_level(origin, _text(call.query, "prefix"))
        return {
            "objects": [_row(info) for info in listing.objects],
            "prefixes": list(listing.prefixes),
            "is_directory": listing.is_directory,
        }

    def _head(self, call: Call) -> Any:
        origin, age = self._arguments(call)
        return _row(self._node.metadata_within(age, self._since).stat(origin, _text(call.query, "key")))

    def _forget(self, call: Call) -> Any:
        body = call.body if isinstance(call.body, Mapping) else {}
        identity, keys, missed = body.get("origin"), body.get("keys"), body.get("missed", [])
        if not (isinstance(identity, str) and _are_texts(keys) and _are_texts(missed)):
            raise UsageError("the request lacks an origin or keys")
        if missed:
            self._invalidations.send_later(missed, identity, keys)
        with self._lock:
            self._invalidated += 1
            self._open.clear()
        # Also without access now: metadata cached with access would be served when there is access again.
        self._node.metadata.invalidate(self._origins.find(identity) or NamedOrigin(identity), *keys)
        self._node.drop_checkpoint_files(identity, keys)
        return {"view": self._invalidations.view().version}

    def _arguments(self, call: Call) -> tuple[Origin, float]:
        origin = self._origins.find(_text(call.query, "origin"))
        if origin is None:
            raise OriginUnavailableError("this node has no access to that origin")
        try:
            age = float(call.query["age"])
        except (KeyError, ValueError) as error:
            raise UsageError("the query lacks an age") from error
        if not age > 0:
            raise UsageError("an age is above 0")
        self._expire_after_absence()
        return origin, age


def _text(query: Mapping[str, str], name: str) -> str:
    value = query.get(name)
    if value is None:
        raise UsageError(f"the query lacks {name!r}")
    return value


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _row(info: ObjectInfo) -> list[Any]:
    return [info.key, info.size, info.version, info.modified]


def _base_of(prefix: str) -> str:
    """The common prefix of all keys below a directory."""
    return base_of(prefix) if prefix.strip("/") else ""


def _info(row: Any) -> ObjectInfo:
    key, size, version, modified = row
    if not (isinstance(key, str) and type(size) is int and 0 <= size < _LARGEST and isinstance(version, str)):
        raise TypeError("not the metadata of an object")
    return ObjectInfo(key, size, version, float(modified))


def _info_of(key: str, row: Any) -> ObjectInfo:
    """Parse metadata that must be of this key."""
    info = _info(row)
    if info.key != key:
        raise ValueError("the metadata of another object")
    return info


def _listing_of(prefix: str, response: Any) -> Listing:
    """Parse a level of this directory."""
    objects, prefixes = [_info(row) for row in response["objects"]], [str(each) for each in response["prefixes"]]
    if not all(name.startswith(_base_of(prefix)) for name in (*(info.key for info in objects), *prefixes)):
        raise ValueError("a level of another directory")
    return Listing(objects, prefixes, bool(response["is_directory"]))


class _ListingProgress:
    """The progress of an owner's listing. Accepts only pages that make progress."""

    def __init__(self, prefix: str, after: str) -> None:
        self.through = after
        self._base, self._end = _base_of(prefix), end_of(prefix)
        # The orders of keys that all pages so far are consistent with.
        self._spaces = [Space(b"", folders_first=folders_first) for folders_first in (False, True)]

    @property
    def is_over(self) -> bool:
        """Whether the listing is complete."""
        return self.through == self._end

    def take(self, response: Any) -> ListingPart:
        """Parse the next page. Raises `ValueError` (also `KeyError`, `TypeError`) for an invalid one."""
        objects = [_info(row) for row in response["objects"]]
        part = ListingPart(objects, response["through"], bool(response["is_directory"]))
        keys = [info.key for info in part.objects]
        if not isinstance(part.through, str) or not all(key.startswith(self._base) for key in keys):
            raise ValueError("a listing of another directory")
        if part.through != self._end:  # an origin without an order returns everything at once
            self._spaces = [space for space in self._spaces if self._makes_progress(space, keys, part.through)]
            if not self._spaces:
                raise ValueError("a listing without progress")
        self.through = part.through
        return part

    def _makes_progress(self, space: Space, keys: list[str], through: str) -> bool:
        places = [space.position(key) for key in (self.through, *keys)]
        last = space.position(through)
        return all(one < other for one, other in itertools.pairwise(places)) and places[0] < last >= places[-1]
