"""Metadata in a cluster: one member asks the origin about a bucket, and answers the others.

A bucket's *teller* is the owner of the digest of origin and bucket. Who misses a page of a listing, a level or a description
asks it, the next in the order where it does not answer, and then the origin. A teller answers out of its own memory what is
at most half as old as the asker believes things; the asker counts the other half for what it gets, so nobody believes
anything for longer than his option `consistency` says, without clocks being compared.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from millrace.cache.asking import ASK_ORIGIN
from millrace.cache.listing_stream import Answer, base_of, end_of
from millrace.cache.node import CacheNode
from millrace.cache.positions import Space
from millrace.errors import OriginUnavailableError, PeerError, PeerSilentError, UsageError
from millrace.events import Event, emit
from millrace.members import Member
from millrace.origin import Listing, ListingPage, ObjectInfo, Origin
from millrace.peers.cluster import Cluster
from millrace.peers.origins import NamedOrigin, Origins
from millrace.peers.server import Call, PlaneServer
from millrace.peers.telling import FORGET, Telling, heard

_T = TypeVar("_T")

_TELLERS = 2
_DEADLINE_SECONDS = 2.0
_OPEN_LISTINGS = 64  # that a teller keeps to go on with
_MOST_UNTOLD = 1000  # directories
_LARGEST = 1 << 60  # bytes of an object

LISTING, LEVEL, HEAD = "/v1/listing", "/v1/level", "/v1/head"


def teller_id(identity: str, key: str) -> bytes:
    """What stands for the metadata of a key's bucket in placement."""
    bucket = key.lstrip("/").partition("/")[0]
    text = f"metadata\0{identity}\0{bucket}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ClusterListings:
    """Whom a process in a cluster asks about keys (an `Asking`). Thread-safe.

    `max_age_seconds` is how long the process believes what it hears.
    """

    def __init__(self, cluster: Cluster, max_age_seconds: float) -> None:
        self._cluster = cluster
        self._telling = Telling(cluster)
        # Of what holds for ever no half has to be counted.
        self._age = 0.0 if max_age_seconds == math.inf else max_age_seconds / 2
        self._max_age = max_age_seconds
        self._asks_peers = max_age_seconds > 0
        self._untold: dict[tuple[str, str], float] = {}
        self._limit = "inf" if max_age_seconds == math.inf else repr(self._age)

    def head(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        told = self._ask(origin, key, HEAD, {"key": key}, _info_of(key))
        return ASK_ORIGIN.head(origin, key) if told is None else (told, self._age)

    def list_level(self, origin: Origin, prefix: str) -> tuple[Listing, float]:
        told = self._ask(origin, prefix, LEVEL, {"prefix": prefix}, _listing_of(prefix))
        return ASK_ORIGIN.list_level(origin, prefix) if told is None else (told, self._age)

    def list_pages(
        self, origin: Origin, prefix: str, *, after: str, settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[tuple[ListingPage, float]]:
        heard = _Heard(prefix, after)
        while True:
            told = self._ask(origin, prefix, LISTING, {"prefix": prefix, "after": heard.through}, heard.take)
            if told is None:
                yield from ASK_ORIGIN.list_pages(origin, prefix, after=heard.through, settled=settled)
                return
            yield ListingPage(told.objects, heard.is_over, told.is_directory), self._age
            if heard.is_over:
                return

    def changed(self, origin: Origin, keys: Sequence[str]) -> bool:
        if origin.head_is_local or not keys:
            return False
        by_bucket = {key.lstrip("/").partition("/")[0]: key for key in keys}
        orders = [self._tellers(origin.identity, key) for key in by_bucket.values()]
        # All that are asked first before all that are asked second, who ask those themselves.
        first = {member.id: member for rank in itertools.zip_longest(*orders) for member in rank if member is not None}
        untold = self._telling.tell(origin.identity, keys, list(first.values()))
        if self._asks_peers and not untold.isdisjoint(first):
            # It may come back with what it knew before: what this process has written it asks the origin about.
            for key in keys:
                self._note_untold(origin.identity, key)
        # This machine's node is told as all others are; without one, nobody was told on behalf of who asks from here.
        me = self._cluster.link.member_id
        return bool(first) and (me is None or me in untold)

    def owed(self) -> int:
        """How many keys are still to be told to members that could not be told at once."""
        return self._telling.owed()

    def _tellers(self, identity: str, key: str) -> Sequence[Member]:
        return self._cluster.placement().order(teller_id(identity, key))[:_TELLERS]

    def _ask(
        self, origin: Origin, key: str, path: str, query: Mapping[str, str], read: Callable[[Any], _T]
    ) -> _T | None:
        """What a teller says; None where the origin is to be asked: I am the teller, or none can help."""
        if not self._asks_peers or origin.head_is_local:
            return None
        me = self._cluster.link.member_id
        if self._untold and self._is_untold(origin.identity, key):
            return None
        asked = {"origin": origin.identity, "age": self._limit, **query}
        for member in self._tellers(origin.identity, key):
            if member.id == me:
                return None
            if not self._cluster.may_ask(member):
                continue
            try:
                told = self._cluster.client.call(member, "GET", path, query=asked, deadline=_DEADLINE_SECONDS)
                self._cluster.breakers.worked(member.id)
                return read(told)
            except PeerError as error:
                heard(self._cluster, member, error)
                if not isinstance(error, PeerSilentError):
                    return None  # whatever it is, the origin knows better, and its own error is the one to raise
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                emit(Event(name="peer.refused", subject=member.id, detail=f"an answer that is none: {error!r}"))
                return None
        return None

    def _note_untold(self, identity: str, key: str) -> None:
        """Remember the directory of what was written, and tellers may not know, for as long as answers are believed."""
        if len(self._untold) >= _MOST_UNTOLD:
            self._untold.clear()
            key = ""  # whose directory is that of all
        self._untold[identity, key[: key.rfind("/") + 1]] = time.monotonic() + self._max_age

    def _is_untold(self, identity: str, key: str) -> bool:
        """Whether an answer about `key`, or what lies below it, could lack what this process has written."""
        now = time.monotonic()
        for (of, directory), until in list(self._untold.items()):
            if until < now:
                self._untold.pop((of, directory), None)
            elif of == identity and (key.startswith(directory) or directory.startswith(_base_of(key))):
                return True
        return False


class Teller:
    """Answers other members about keys out of the memory of this node. Thread-safe."""

    def __init__(self, node: CacheNode, origins: Origins) -> None:
        self._node = node
        self._origins = origins
        self._open: OrderedDict[tuple[str, str, str, str], Iterator[Answer]] = OrderedDict()
        self._forgotten = 0  # how often something was
        self._lock = threading.Lock()

    def add_routes(self, server: PlaneServer) -> None:
        """Have `server` answer with this."""
        server.route("GET", LISTING, self._listing)
        server.route("GET", LEVEL, self._level)
        server.route("GET", HEAD, self._head)
        server.route("POST", FORGET, self._forget)

    def _listing(self, call: Call) -> Any:
        origin, age = self._asked(call)
        prefix, after = _text(call.query, "prefix"), _text(call.query, "after")
        name = origin.identity, prefix, call.query["age"], after
        with self._lock:
            forgotten = self._forgotten
            answers = self._open.pop(name, None)
        if answers is None:
            answers = self._node.metadata_within(age).answers(origin, prefix, after)
        answer = next(answers, None)
        if answer is None:
            answer = Answer([], end_of(prefix))
        if answer.through != end_of(prefix):
            with self._lock:
                if forgotten == self._forgotten:  # else its next page may be one that was asked for before
                    self._open[(*name[:3], answer.through)] = answers
                while len(self._open) > _OPEN_LISTINGS:
                    self._open.popitem(last=False)
        return {
            "objects": [_row(info) for info in answer.objects],
            "through": answer.through,
            "is_directory": answer.is_directory,
        }

    def _level(self, call: Call) -> Any:
        origin, age = self._asked(call)
        listing = self._node.metadata_within(age).list_level(origin, _text(call.query, "prefix"))
        return {
            "objects": [_row(info) for info in listing.objects],
            "prefixes": list(listing.prefixes),
            "is_directory": listing.is_directory,
        }

    def _head(self, call: Call) -> Any:
        origin, age = self._asked(call)
        return _row(self._node.metadata_within(age).stat(origin, _text(call.query, "key")))

    def _forget(self, call: Call) -> Any:
        body = call.body if isinstance(call.body, Mapping) else {}
        identity, keys = body.get("origin"), body.get("keys", [body.get("key")])
        if not (isinstance(identity, str) and isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
            raise UsageError("the request lacks an origin or a key")
        with self._lock:
            self._forgotten += 1
            self._open.clear()
        # Also without access now: what was heard when there was access would be told when there is again.
        self._node.metadata.forget(self._origins.find(identity) or NamedOrigin(identity), *keys)
        return {}

    def _asked(self, call: Call) -> tuple[Origin, float]:
        origin = self._origins.find(_text(call.query, "origin"))
        if origin is None:
            raise OriginUnavailableError("this node has no access to that origin")
        try:
            age = float(call.query["age"])
        except (KeyError, ValueError) as error:
            raise UsageError("the query lacks an age") from error
        if not age > 0:
            raise UsageError("an age is above 0")
        return origin, age


def _text(query: Mapping[str, str], name: str) -> str:
    value = query.get(name)
    if value is None:
        raise UsageError(f"the query lacks {name!r}")
    return value


def _row(info: ObjectInfo) -> list[Any]:
    return [info.key, info.size, info.version, info.modified]


def _base_of(prefix: str) -> str:
    """The text with which all begins that is listed below a directory."""
    return base_of(prefix) if prefix.strip("/") else ""


def _info(row: Any) -> ObjectInfo:
    key, size, version, modified = row
    if not (isinstance(key, str) and type(size) is int and 0 <= size < _LARGEST and isinstance(version, str)):
        raise TypeError("no description of an object")
    return ObjectInfo(key, size, version, float(modified))


def _info_of(key: str) -> Callable[[Any], ObjectInfo]:
    """Reads a description that must be of this key."""

    def read(row: Any) -> ObjectInfo:
        info = _info(row)
        if info.key != key:
            raise ValueError("the description of another object")
        return info

    return read


def _listing_of(prefix: str) -> Callable[[Any], Listing]:
    """Reads a level of this directory."""

    def read(told: Any) -> Listing:
        objects, prefixes = [_info(row) for row in told["objects"]], [str(each) for each in told["prefixes"]]
        if not all(name.startswith(_base_of(prefix)) for name in (*(info.key for info in objects), *prefixes)):
            raise ValueError("a level of another directory")
        return Listing(objects, prefixes, bool(told["is_directory"]))

    return read


class _Heard:
    """How far a teller's listing has come. Whatever it answers, each answer comes on, or is none."""

    def __init__(self, prefix: str, after: str) -> None:
        self.through = after
        self._base, self._end = _base_of(prefix), end_of(prefix)
        # Of the orders that origins have, those that all answers so far keep to.
        self._spaces = [Space(b"", folders_first=folders_first) for folders_first in (False, True)]

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self.through == self._end

    def take(self, told: Any) -> Answer:
        """Read the next answer. Raises `ValueError` (also `KeyError`, `TypeError`) for what is none."""
        answer = Answer([_info(row) for row in told["objects"]], told["through"], bool(told["is_directory"]))
        keys = [info.key for info in answer.objects]
        if not isinstance(answer.through, str) or not all(key.startswith(self._base) for key in keys):
            raise ValueError("a listing of something else")
        if answer.through != self._end:  # what an origin gives in no order comes as a whole
            self._spaces = [space for space in self._spaces if self._comes_on(space, keys, answer.through)]
            if not self._spaces:
                raise ValueError("a listing that does not come on")
        self.through = answer.through
        return answer

    def _comes_on(self, space: Space, keys: list[str], through: str) -> bool:
        places = [space.position(key) for key in (self.through, *keys)]
        last = space.position(through)
        return all(one < other for one, other in itertools.pairwise(places)) and places[0] < last >= places[-1]
