"""What other nodes and the command line ask of a node, besides blocks and metadata."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millrace.cache import catalog
from millrace.config import parse_amount
from millrace.errors import MillraceError, ObjectNotFoundError, UsageError
from millrace.filesystem.load_jobs import LoadOrder, error_to_json
from millrace.members import MemberState
from millrace.peers.server import Call, PlaneServer

if TYPE_CHECKING:
    from millrace.filesystem.node_process import NodeProcess

_MOST_DRAIN_SECONDS = 3600.0


def add_commands(server: PlaneServer, node: NodeProcess) -> None:
    """Have `server` answer the commands about `node`."""
    commands = _Commands(node)
    server.route("GET", "/v1/view", commands.view)
    server.route("GET", "/v1/status", commands.status)
    server.route("GET", "/v1/counters", commands.counters)
    server.route("POST", "/v1/load", commands.start_load)
    server.route("GET", "/v1/load/", commands.load_state)
    server.route("DELETE", "/v1/load/", commands.cancel_load)
    server.route("POST", "/v1/drain", commands.drain)
    server.route("POST", "/v1/drained", commands.drained)
    server.route("POST", "/v1/state", commands.told_state)
    server.route("POST", "/v1/limits", commands.limits)


class _Commands:
    def __init__(self, node: NodeProcess) -> None:
        self._node = node

    def view(self, _: Call) -> Any:
        return self._node.view().to_json()

    def status(self, _: Call) -> Any:
        return self._node.status()

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
            raise ObjectNotFoundError("this node knows no such load", next_step="start it here")
        return state

    def cancel_load(self, call: Call) -> Any:
        self._node.jobs.cancel(call.path_rest)
        return {}

    # --- coming and going ---------------------------------------------------------------------------

    def drain(self, call: Call) -> Any:
        """Answers at once: whoever asked sees by the status when the node has gone."""
        seconds = call.body.get("seconds", 60.0) if isinstance(call.body, Mapping) else None
        if not isinstance(seconds, int | float) or not 0 <= seconds <= _MOST_DRAIN_SECONDS:
            raise UsageError("drain takes 'seconds', at most 3600", next_step="use 'millrace node drain'")
        threading.Thread(target=self._node.drain, args=(float(seconds),), name="millrace-drain", daemon=True).start()
        return {"member_id": self._node.member_id}

    def drained(self, call: Call) -> Any:
        self._node.heirs.has_taken_over(_text(call.body, "member"))
        return {}

    def told_state(self, call: Call) -> Any:
        try:
            state = MemberState(_text(call.body, "state"))
        except ValueError as error:
            raise UsageError("this is no state of a member", next_step="use the same version on all nodes") from error
        self._node.hear_state(_text(call.body, "member"), state)
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
