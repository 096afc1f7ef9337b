"""The log lines of the event stream: every event with its level and a sentence for people, and the hook that logs them.

Each package has one logger (`millrace.cache`, `millrace.cluster`, ...). Millrace sets up no handlers and no levels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from millrace.errors import printable, without_queries
from millrace.events import Event, add_hook, fetch_id

REPEAT_SECONDS = 60.0
"""The same event of the same subject is logged at its level once in this time, and at DEBUG in between."""

_MAX_SUBJECTS = 1024
_DEBUG, _INFO, _WARNING = logging.DEBUG, logging.INFO, logging.WARNING


class Declared(NamedTuple):
    """The level of an event and its meaning. Without a level, the code that emits it logs a line of its own."""

    level: int | None
    text: str


EVENTS = {
    "cache.block.corrupt": Declared(_WARNING, "a cached block was damaged; it was removed and is fetched again"),
    "cache.disk.opened": Declared(_INFO, "the cache directory can be used now"),
    "cache.disk.failed": Declared(_WARNING, "the cache directory cannot be used; reads and writes continue without it"),
    "cache.disk.left_out": Declared(None, "the cache on this disk is not usable; reads go to the origin"),
    "cache.evicted": Declared(_DEBUG, "removed to make room"),
    "cache.file.changed": Declared(_WARNING, "a cached file was modified; it is verified again"),
    "cache.file.lost": Declared(_WARNING, "a cached file was removed or truncated; it is fetched again"),
    "cache.file.recreated": Declared(None, "a file of the cache could not be used and was recreated"),
    "cache.folder.closed": Declared(None, "a folder was open to other users; its mode was changed"),
    "cache.full": Declared(None, "the cache or a quota is full; reads continue uncached"),
    "cache.maintenance.failed": Declared(_WARNING, "the periodic maintenance of the cache failed; it is repeated"),
    "cache.index.corrupt": Declared(_WARNING, "records of the index were damaged and were removed"),
    "cache.leftover.removed": Declared(_INFO, "a file without a record, or a folder of an ended process, was removed"),
    "cache.metadata.cleared": Declared(_INFO, "the cached listings became too large and were removed"),
    "cache.over_capacity": Declared(_WARNING, "the cache is larger than its capacity, because its content is pinned"),
    "cache.pinned.evicted": Declared(_WARNING, "pinned data was removed, because other programs fill the disk"),
    "cache.prefetch.refused": Declared(_DEBUG, "a prefetch was not started, because the process is ending"),
    "cache.rules.unreadable": Declared(None, "the pins and quotas cannot be read"),
    "cache.store.discarded": Declared(None, "the content of the cache was discarded"),
    "cache.store.rebuilding": Declared(None, "the index is being rebuilt from the cached files"),
    "cache.store.rebuilt": Declared(None, "the index was rebuilt from the cached files"),
    "checkpoint.base.unreadable": Declared(_WARNING, "the base of a delta cannot be read; the save continues in full"),
    "checkpoint.base.unusable": Declared(_WARNING, "the base of a delta cannot be used; the save continues in full"),
    "checkpoint.claim.clean.failed": Declared(_WARNING, "an old writer file was not removed; it has no effect"),
    "checkpoint.claim.release.failed": Declared(_WARNING, "the run was not released; the next manager waits longer"),
    "checkpoint.discard.failed": Declared(_WARNING, "the files of a failed save were not removed"),
    "checkpoint.orphans.removed": Declared(_INFO, "files without a manifest were removed"),
    "checkpoint.previous.unreadable": Declared(_WARNING, "the checkpoint that is replaced cannot be listed"),
    "checkpoint.progress.failed": Declared(_WARNING, "the on_progress function raised an error"),
    "checkpoint.prune.note.failed": Declared(_WARNING, "the record of a pruning was not written"),
    "checkpoint.prune.note.unreadable": Declared(
        _WARNING, "the record of a pruning is not valid; its files stay longer"
    ),
    "checkpoint.prune.unreadable": Declared(_WARNING, "a checkpoint cannot be read; pruning leaves it"),
    "checkpoint.pruned": Declared(_INFO, "checkpoints were removed"),
    "checkpoint.replica.failed": Declared(_WARNING, "a save was not copied to another node; it is uploaded as usual"),
    "checkpoint.replicated": Declared(_INFO, "a save is on other nodes, too, and survives the loss of this one"),
    "checkpoint.sweep.failed": Declared(_WARNING, "files without a manifest were not removed"),
    "checkpoint.tier.damaged": Declared(_WARNING, "a file of a near copy is damaged; it is read from the next place"),
    "checkpoint.tier.left": Declared(_WARNING, "a checkpoint was not uploaded; it stays on the local disk"),
    "checkpoint.tier.outdated": Declared(_WARNING, "a checkpoint on a disk is not used: the run continued elsewhere"),
    "checkpoint.tier.refused": Declared(_WARNING, "a local disk did not take a checkpoint"),
    "checkpoint.tier.unreachable": Declared(_WARNING, "a place with copies of checkpoints cannot be read"),
    "cluster.folder.failed": Declared(_WARNING, "the list of nodes was not written to disk; it is tried again"),
    "cluster.joined": Declared(_INFO, "this node has joined the cluster"),
    "cluster.leaving": Declared(_INFO, "this node is leaving the cluster"),
    "cluster.left": Declared(_INFO, "this node has left the cluster"),
    "cluster.member.awaited": Declared(_INFO, "a node has not responded yet; it may not have started"),
    "cluster.member.doubled": Declared(None, "another node has the id of this node; stop one of the two"),
    "cluster.member.here": Declared(_INFO, "a node has joined"),
    "cluster.member.leaving": Declared(_INFO, "a node is leaving"),
    "cluster.member.lost": Declared(_WARNING, "a node was lost"),
    "cluster.member.no_response": Declared(_WARNING, "a node did not respond while this node left"),
    "cluster.membership.failed": Declared(_WARNING, "the other nodes were not notified of a change; it is tried again"),
    "cluster.move.failed": Declared(_WARNING, "blocks were not moved; missing blocks are fetched when they are read"),
    "cluster.moved": Declared(_INFO, "blocks were moved to this node"),
    "cluster.replicas.expired": Declared(_INFO, "replicas of checkpoints of a job that did not return were deleted"),
    "cluster.node.failed": Declared(_WARNING, "the Millrace node of a Ray node did not start"),
    "origin.gate.closed": Declared(_WARNING, "the origin requests a pause; no requests are sent"),
    "origin.gate.opened": Declared(_INFO, "the origin accepts requests again"),
    "origin.limits.default": Declared(_INFO, "the default request limits hold for this process only"),
    "origin.limits.private": Declared(_WARNING, "the request limits hold for this process only"),
    "origin.netrc.unusable": Declared(_WARNING, "the netrc file cannot be used"),
    "origin.request.failed": Declared(_INFO, "a request failed"),
    "peer.answer.broken": Declared(_WARNING, "a response to a peer was interrupted"),
    "peer.breaker.closed": Declared(_INFO, "the peer responds"),
    "peer.breaker.opened": Declared(_WARNING, "the peer does not respond; reads skip it"),
    "peer.corrupt": Declared(_WARNING, "a peer sent damaged bytes; they were not used"),
    "peer.failed": Declared(_INFO, "a request to a peer failed"),
    "peer.handover.failed": Declared(_INFO, "blocks were not copied to their owner; it fetches them itself"),
    "peer.invalidation_dropped": Declared(
        _WARNING, "nodes were not notified of changed objects; their metadata expires by age"
    ),
    "peer.invalidation_late": Declared(_INFO, "the node was notified late of changed objects"),
    "peer.origin.denied": Declared(_WARNING, "this node has no access to an origin that other nodes read"),
    "peer.origin.unusable": Declared(_WARNING, "this node cannot read an origin that other nodes read"),
    "peer.refused": Declared(_INFO, "a peer refused a request"),
    "peer.server.exhausted": Declared(_WARNING, "a connection was refused: no descriptors, memory or threads"),
    "peer.server.failed": Declared(None, "a connection ended because of a defect, whose traceback is in the log"),
    "peer.unauthorized": Declared(None, "the peer has another cluster token; use the same one on all nodes"),
    "prefetch.failed": Declared(_WARNING, "a prefetch failed; the files are fetched when they are read"),
    "run.base.damaged": Declared(_WARNING, "the base of a delta is damaged; the save continues in full"),
    "run.base.gone": Declared(_WARNING, "the base of a delta is missing; the save continues in full"),
    "run.base.unreadable": Declared(_WARNING, "the base of a delta cannot be read; the save continues in full"),
    "run.history.unreadable": Declared(_WARNING, "the earlier checkpoints cannot be read; the next save is full"),
    "run.leftover.failed": Declared(_WARNING, "the files of an interrupted save were not removed"),
    "run.metric.not_finite": Declared(_WARNING, "a metric is not a finite number"),
    "run.notice.failed": Declared(
        _WARNING, "the other ranks were not notified of a failed save; they wait for the timeout"
    ),
    "run.policy.matches_nothing": Declared(_WARNING, "the retention policy matches no checkpoint"),
    "run.preempted": Declared(_INFO, "a signal announced the end of this process"),
    "run.prune.failed": Declared(_WARNING, "checkpoints were not removed"),
    "run.restore.fallback": Declared(_WARNING, "a damaged checkpoint was skipped"),
    "run.restored": Declared(_INFO, "a checkpoint was restored"),
    "run.save.ended": Declared(_WARNING, "a save failed"),
    "run.save.failed": Declared(_WARNING, "an earlier save failed"),
    "run.saved": Declared(_INFO, "a checkpoint was saved"),
    "run.saver.unavailable": Declared(_WARNING, "asynchronous saves use this process, and save_async waits for them"),
    "run.upload.backlog": Declared(_DEBUG, "bytes of saves that are not uploaded yet"),
}
"""Every event by name. `docs/reference/events.md` is generated from this table."""

_PACKAGES = {"peer": "cluster", "run": "checkpoint", "prefetch": "filesystem"}


def package_of(name: str) -> str:
    """The package of an event, which is the last part of its logger's name."""
    first = name.partition(".")[0]
    return _PACKAGES.get(first, first)


_LOGGERS = {name: logging.getLogger(f"millrace.{package_of(name)}") for name in EVENTS}
_UNKNOWN = Declared(_INFO, "an event")


class EventLog:
    """The hook that logs events. Thread-safe; usable after a fork. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until: dict[tuple[str, str], float] = {}

    def __call__(self, event: Event) -> None:
        level = EVENTS.get(event.name, _UNKNOWN).level
        if level is None:
            return
        logger = _LOGGERS.get(event.name) or logging.getLogger(f"millrace.{package_of(event.name)}")
        if not logger.isEnabledFor(level):
            return
        if level > _DEBUG and self._is_repeated(event):
            level = _DEBUG
            if not logger.isEnabledFor(level):
                return
        logger.log(level, "%s", _with_fetch(line_of(event)), extra={"event": event.name})

    def _is_repeated(self, event: Event) -> bool:
        now, key = self._clock(), (event.name, event.subject)
        if now < self._quiet_until.get(key, now):
            return True
        if len(self._quiet_until) >= _MAX_SUBJECTS:
            self._quiet_until.clear()
        self._quiet_until[key] = now + REPEAT_SECONDS
        return False


def detail_of(event: Event) -> str:
    """The detail without the subject, which errors begin with."""
    return "" if event.detail == event.subject else event.detail.removeprefix(f"{event.subject}: ")


def line_of(event: Event) -> str:
    """One line: the subject, what happened, and the detail."""
    parts = (event.subject, EVENTS.get(event.name, _UNKNOWN).text, detail_of(event))
    return printable(without_queries(": ".join(part for part in parts if part)))


def level_of(event: Event) -> int:
    """The level of an event; WARNING for those whose line is logged by the code that emits them."""
    level = EVENTS.get(event.name, _UNKNOWN).level
    return _WARNING if level is None else level


def _with_fetch(line: str) -> str:
    """A line with the fetch that the event was a part of."""
    found = fetch_id.get()
    return f"{line} (fetch {found})" if found else line


add_hook(EventLog())
