"""Tells the members of a cluster what was written or removed, so that none goes on believing what it remembers of it.

A write returns when every member that can be reached has forgotten the key. A bucket's tellers come first: whoever is told
after them, and asks one of them at once, must not hear the old answer again. Who could not be told is told later by a
thread, for as long as this process lives, and ten minutes at most; what its readers see until then is what `consistency`
allows.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from millrace.errors import PeerError, PeerSilentError
from millrace.events import Event, emit
from millrace.members import Member
from millrace.peers.cluster import Cluster
from millrace.peers.wire import MAX_BODY_BYTES

FORGET = "/v1/forget"

MOST_LATE = 10_000
"""Keys, over all members, that are kept to be told later; of more the oldest are given up, with an event."""

_DEADLINE_SECONDS = 2.0
_KEY_SECONDS = 0.005  # ten times what it takes
_THREADS = 16
_PAUSE_SECONDS = 1.0
_KEPT_SECONDS = 600.0
_BATCH_BYTES = MAX_BODY_BYTES // 2


class Telling:
    """Tells members to forget keys. Thread-safe; in a forked child it owes nothing to anybody. Never raises."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._change = threading.Condition()
        self._late: dict[tuple[str, str, str], float] = {}
        """By member, origin and key: until when (monotonic) it is still worth telling. The oldest come first."""
        self._thread: threading.Thread | None = None

    def tell(self, identity: str, keys: Sequence[str], first: Sequence[Member]) -> set[str]:
        """Have every member forget `keys` of an origin, those of `first` one after the other before all the rest.

        That of this machine as well: what its readers heard since this process forgot the keys may be from one that was
        told only then. Gives the ids of those that could not be told now; they are told later.
        """
        if self._pid != os.getpid():
            self._begin()
        done = {member.id for member in first}
        rest = [member for member in self._cluster.placement().view.members if member.id not in done]
        untold = {member.id for member in first if not self._tell(member, identity, keys)}
        told = self._tell_all(rest, identity, keys)
        untold |= {member.id for member, was_told in zip(rest, told, strict=True) if not was_told}
        if untold:
            self._owe(untold, identity, keys)
        return untold

    def owed(self) -> int:
        """How many keys are still to be told to somebody."""
        with self._change:
            return len(self._late)

    # --- now --------------------------------------------------------------------------------------

    def _tell_all(self, members: Sequence[Member], identity: str, keys: Sequence[str]) -> Iterable[bool]:
        if len(members) < 2:
            return [self._tell(member, identity, keys) for member in members]
        try:
            with ThreadPoolExecutor(min(len(members), _THREADS), thread_name_prefix="millrace-tell") as pool:
                return list(pool.map(lambda member: self._tell(member, identity, keys), members))
        except RuntimeError:  # the interpreter is ending, and gives no threads any more
            return [self._tell(member, identity, keys) for member in members]

    def _tell(self, member: Member, identity: str, keys: Sequence[str]) -> bool:
        """Have a member forget keys; whether it has."""
        if not self._cluster.may_ask(member):
            return False
        try:
            for batch in batches(keys):
                # By the word that every version of a node understands, where one key is all there is.
                what = {"key": batch[0]} if len(batch) == 1 else {"keys": batch}
                body = {"origin": identity, **what}
                deadline = _DEADLINE_SECONDS + len(batch) * _KEY_SECONDS
                self._cluster.client.call(member, "POST", FORGET, body, deadline=deadline)
        except PeerError as error:
            heard(self._cluster, member, error)
            return False
        self._cluster.breakers.worked(member.id)
        return True

    # --- later ------------------------------------------------------------------------------------

    def _owe(self, members: Iterable[str], identity: str, keys: Sequence[str]) -> None:
        until = time.monotonic() + _KEPT_SECONDS
        given_up = 0
        with self._change:
            for member_id in members:
                for key in keys:
                    self._late.pop((member_id, identity, key), None)
                    self._late[member_id, identity, key] = until
            while len(self._late) > MOST_LATE:
                del self._late[next(iter(self._late))]
                given_up += 1
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="millrace-tell-later", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:  # the interpreter is ending: nobody is left to tell it later
                    self._late.clear()
        if given_up:
            emit(Event(name="peer.untold", subject=identity, detail=f"{given_up} keys, of too many"))

    def _run(self) -> None:
        while True:
            time.sleep(_PAUSE_SECONDS)
            now = time.monotonic()
            with self._change:
                late = {name: until for name, until in self._late.items() if until > now}
                for name in self._late.keys() - late.keys():
                    del self._late[name]
                if not late:
                    self._thread = None
                    return
            for member_id, identity in dict.fromkeys(name[:2] for name in late):
                owed = {key: until for (*of, key), until in late.items() if of == [member_id, identity]}
                self._tell_late(member_id, identity, owed)

    def _tell_late(self, member_id: str, identity: str, owed: Mapping[str, float]) -> None:
        """Tell a member the keys of `owed`, each with the end of its time that was read before."""
        keys = list(owed)
        members = self._cluster.placement().view.members
        member = next((each for each in members if each.id == member_id), None)
        if member is None or not self._tell(member, identity, keys):
            return
        with self._change:
            for key, until in owed.items():
                # A write meanwhile, that it was not told of either, owes the key anew.
                if self._late.get((member_id, identity, key)) == until:
                    del self._late[member_id, identity, key]
        # Whoever asked it meanwhile heard the old answer, and remembers that: also the readers on this machine.
        self._tell_all([each for each in members if each.id != member_id], identity, keys)
        emit(Event(name="peer.told_late", subject=member_id, detail=f"{len(keys)} keys of {identity}"))


def heard(cluster: Cluster, member: Member, error: PeerError) -> None:
    """Note what a failure says of a member."""
    if isinstance(error, PeerSilentError):
        cluster.breakers.failed(member.id)
        emit(Event(name="peer.failed", subject=member.id, detail=str(error)))
    else:
        emit(Event(name="peer.refused", subject=member.id, detail=str(error)))


def batches(keys: Sequence[str], most_bytes: int = _BATCH_BYTES) -> Iterator[list[str]]:
    """Keys in batches that each fit into the body of one request. Pure."""
    batch: list[str] = []
    nbytes = 0
    for key in keys:
        size = len(json.dumps(key)) + 2
        if batch and nbytes + size > most_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(key)
        nbytes += size
    if batch:
        yield batch
