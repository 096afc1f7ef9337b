"""The requests of other nodes and of the command line to a node, apart from blocks and metadata."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millrace.cache import catalog
from millrace.cluster.dataplane.server import Call, PlaneServer
from millrace.cluster.dataplane.wire import LOAD_PATH
from millrace.cluster.load_order import LoadOrder
from millrace.cluster.membership import MemberState
from millrace.config import parse_amount
from millrace.errors import MillraceError, ObjectNotFoundError, UsageError
from millrace.node.load_jobs import error_to_json

if TYPE_CHECKING:
    from millrace.node.process import NodeProcess

_MOST_DRAIN_SECONDS = 3600.0


def add_commands(server: PlaneServer, node: NodeProcess) -> None:
    """Register the commands of `node` at `server`."""
    commands = _Commands(node)
    server.route("GET", "/v1/view", commands.view)
    server.route("GET", "/v1/status", commands.status)
    server.route("GET", "/v1/counters", commands.counters)
    server.route("POST", LOAD_PATH, commands.start_load)
    server.route("GET", "/v1/load/", commands.load_state)
    server.route("DELETE", "/v1/load/", commands.cancel_load)
    server.route("POST", "/v1/drain", commands.drain)
    server.route("POST", "/v1/drained", commands.drained)
    server.route("POST", "/v1/state", commands.set_state)
    server.route("POST", "/v1/limits", commands.limits)


class _Commands:
    def __init__(self, node: NodeProcess) -> None:
        self._node = node

    def view(self, _: Call) -> Any:
        return self._node.view().to_json()

    def status(self, call: Call) -> Any:
        return self._node.status(details=call.query.get("details") == "1")

    def counters(self, call: Call) -> Any:
        return self._node.counters(settled=call.query.get("settled") == "1")

    # --- loads ------------------------------------------------------------------------------------

    def start_load(self, call: Call) -> Any:
        order = LoadOrder.from_json(call.body)
        try:
            return self._node.jobs.start(_text(call.body, "job"), order)
        except MillraceError as error:
            return {"state": "failed", "error": error_to_json(error)}

    def load_state(self, call: Call) -> Any:
        state = self._node.jobs.state(call.path_rest)
        if state is None:
            raise ObjectNotFoundError("no load with this id on this node", next_step="start it again")
        return state

    def cancel_load(self, call: Call) -> Any:
        self._node.jobs.cancel(call.path_rest)
        return {}

    # --- joining and leaving ------------------------------------------------------------------------

    def drain(self, call: Call) -> Any:
        """Responds at once: the status shows when the node has left."""
        seconds = call.body.get("seconds", 60.0) if isinstance(call.body, Mapping) else None
        if not isinstance(seconds, int | float) or not 0 <= seconds <= _MOST_DRAIN_SECONDS:
            raise UsageError("drain: 'seconds' must be between 0 and 3600", next_step="use 'millrace node drain'")
        threading.Thread(target=self._node.drain, args=(float(seconds),), name="millrace-drain", daemon=True).start()
        return {"member_id": self._node.member_id}

    def drained(self, call: Call) -> Any:
        member_id, owners = _text(call.body, "member"), call.body.get("owners", [])
        if not isinstance(owners, list) or not all(isinstance(owner, str) for owner in owners):
            raise UsageError("drained: 'owners' must be ids of members", next_step="use the same version on all nodes")
        self._node.drains.taken_over(member_id, owners)
        return {}

    def set_state(self, call: Call) -> Any:
        try:
            state = MemberState(_text(call.body, "state"))
        except ValueError as error:
            raise UsageError("not a state of a member", next_step="use the same version on all nodes") from error
        self._node.set_member_state(_text(call.body, "member"), state)
        return {}

    def limits(self, call: Call) -> Any:
        given = call.body.get("capacity") if isinstance(call.body, Mapping) else None
        catalog.resize(self._node.node, None if given is None else parse_amount(given, option="capacity"))
        return {"disks": self._node.status()["disks"]}


def _text(body: Any, name: str) -> str:
    value = body.get(name) if isinstance(body, Mapping) else None
    if not isinstance(value, str) or not 0 < len(value) <= 1000:
        raise UsageError(f"the request lacks {name!r}", next_step="use the same version on all nodes")
    return value
