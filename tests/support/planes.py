"""A node's data plane for tests: a real store, an origin in memory, a real socket, and settable views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.origins import MemoryOrigin
from tests.support.wire_client import TOKEN, WireClient

from millrace.cache.node import CacheNode
from millrace.cluster.breakers import Breakers
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.server import PlaneServer
from millrace.cluster.dataplane.wire import ObjectDescription
from millrace.cluster.membership import Member, MemberState, NodeLink, View
from millrace.cluster.origins import Origins
from millrace.cluster.serving import BlockService
from millrace.config import resolve
from millrace.origin import ObjectInfo

ME = "me"


class Views:
    """Returns the view that the test sets."""

    def __init__(self, *members: str) -> None:
        self.now = View.of(Member(id=name, address="127.0.0.1:1") for name in members)

    def view(self) -> View:
        return self.now

    def become(self, *members: str, **states: MemberState) -> None:
        """From now on these are the members; `states` are those of members that are not `here`."""
        self.now = View.of(
            [
                *(Member(id=name, address="127.0.0.1:1") for name in members),
                *(Member(id=name, address="127.0.0.1:1", state=state) for name, state in states.items()),
            ]
        )


class Plane:
    """One node with its server; a context manager. `server` are keyword arguments of `PlaneServer`, the rest options."""

    def __init__(
        self,
        directory: Path,
        origin: MemoryOrigin | None = None,
        *,
        views: Views | None = None,
        access: bool = True,
        replicas: int = 1,
        server: dict[str, Any] | None = None,
        **options: object,
    ) -> None:
        self.origin = origin or MemoryOrigin()
        self.views = views or Views(ME)
        self.origins = Origins([self.origin] if access else [], environment=False)
        options = {"cache_dir": str(directory), "min_free": 0, "members": "none", **options}
        self.node = CacheNode(resolve(options, environ={}, file={}))
        link = NodeLink(views=self.views, folder="local", member_id=ME, token=TOKEN, replicas=replicas)
        self.service = BlockService(self.node, Cluster(link, breakers=Breakers(None)), self.origins)
        self.server = PlaneServer(self.service, host="127.0.0.1", token=TOKEN, **(server or {}))
        self.address = self.server.address

    def __enter__(self) -> Plane:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.node.close()

    def client(self) -> WireClient:
        """A new connection."""
        return WireClient(self.address)

    def put(self, key: str, data: bytes) -> ObjectDescription:
        """Put an object into the origin; returns its description for peers."""
        self.origin.put(key, data)
        return self.describe(key)

    def describe(self, key: str) -> ObjectDescription:
        """The description of the newest version of an object for peers."""
        info = self.origin.head(key)
        return ObjectDescription(self.origin.identity, key, info.version, info.size)

    def fill(self, key: str, blocks: range | None = None) -> ObjectDescription:
        """Have an object on the disk, as a local reader would."""
        info: ObjectInfo = self.origin.head(key)
        reader = self.node.open_reader(self.origin, info)
        try:
            if blocks is None:
                reader.read(0, info.size)
            else:
                for block in blocks:
                    reader.read(block * reader.block_bytes, (block + 1) * reader.block_bytes)
        finally:
            reader.close()
        return self.describe(key)

    def counters(self) -> dict[str, int]:
        """The counters of the node."""
        return self.node.counters()
