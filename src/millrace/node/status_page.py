"""The status page of a node: `/`, which contains no figures, and `/status.json`, which needs the cluster token."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from millrace.cluster.dataplane.server import Page, PlaneServer
from millrace.cluster.membership import View
from millrace.errors import MillraceError
from millrace.filesystem.cluster_access import ClusterAccess, statuses
from millrace.node.status_document import status_document

if TYPE_CHECKING:
    from millrace.node.process import NodeProcess

_FRESH_SECONDS = 1.0

DETAILS = {"details": "1"}
"""The query of `/v1/status` for the status with a node's part of the page."""


class _Others:
    """The view of a node without itself."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node

    def view(self) -> View:
        me = self._node.member_id
        return View.of(member for member in self._node.view().members if member.id != me)


class StatusDocuments:
    """Collects the document from all nodes, at most once a second for any number of viewers. Thread-safe."""

    def __init__(self, node: NodeProcess, clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._clock = clock
        self._lock = threading.Lock()
        self._fresh_until = 0.0
        self._text = b""

    def text(self) -> bytes:
        """The newest document as JSON. Waits at most three seconds for nodes that do not respond."""
        with self._lock:
            if not self._text or self._clock() >= self._fresh_until:
                self._text = json.dumps(self._collect()).encode()
                self._fresh_until = self._clock() + _FRESH_SECONDS
            return self._text

    def _collect(self) -> dict[str, Any]:
        node = self._node
        others = statuses(ClusterAccess(views=_Others(node), client=node.client), query=DETAILS)
        node.probe(report["member_id"] for report in others if not report["answers"])
        reports = sorted([_report_of(node), *others], key=lambda report: str(report["address"]))
        return status_document(reports, address=node.address, now=time.time())


def _report_of(node: NodeProcess) -> dict[str, Any]:
    """This node's own report, as `statuses` returns those of others."""
    try:
        return {**node.status(details=True), "answers": True}
    except MillraceError as error:
        return {"member_id": node.member_id, "address": node.address, "answers": False, "error": str(error)}


@functools.cache
def static_page() -> Page:
    """The page without figures. Its policy allows the script and the style in it, and requests to the node only."""
    text = resources.files("millrace.node").joinpath("status.html").read_text("utf-8")

    def hashed(tag: str) -> str:
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()

    policy = (
        f"default-src 'none'; script-src 'sha256-{hashed('script')}'; style-src 'sha256-{hashed('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    fields = (
        ("Content-Security-Policy", policy),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-cache"),
    )
    return Page(200, "text/html; charset=utf-8", text.encode(), fields)


def add_status_page(server: PlaneServer, node: NodeProcess) -> None:
    """Register the page and its document."""
    documents = StatusDocuments(node)

    def document() -> Page:
        fields = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))
        return Page(200, "application/json", documents.text(), fields)

    server.page("/", static_page, public=True)
    server.page("/status.json", document)
