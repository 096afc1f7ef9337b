"""One node's data plane as a process of its own, for the case `peers`: prints its address, and serves until its pipe ends.

`python -m benchmarks.peers_server CACHE TOKEN FILE...` has the files in its cache, as blocks or in segments by their size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from millrace.cache.node import CacheNode, close_nodes
from millrace.cluster.breakers import Breakers
from millrace.cluster.cluster import Cluster
from millrace.cluster.dataplane.server import PlaneServer
from millrace.cluster.membership import Member, NodeLink, View
from millrace.cluster.origins import Origins
from millrace.cluster.serving import BlockService
from millrace.config import resolve
from millrace.origin import open_origin

_ME = "benchmark"


class _Views:
    """A cluster of one."""

    def view(self) -> View:
        return View.of([Member(id=_ME, address="127.0.0.1:1")])


def main() -> None:
    cache, token, *files = sys.argv[1:]
    node = CacheNode(resolve({"cache_dir": cache, "min_free": 0, "members": "none"}, environ={}, file={}))
    origin = open_origin("file")
    described = []
    for file in files:
        info = origin.head(str(Path(file).resolve()).lstrip("/"))
        reader = node.open_reader(origin, info)
        for start in range(0, info.size, 8 << 20):
            reader.read(start, min(start + (8 << 20), info.size))
        reader.close()
        described.append([origin.identity, info.key, info.version, info.size])
    link = NodeLink(views=_Views(), folder="local", member_id=_ME, token=token)
    service = BlockService(node, Cluster(link, breakers=Breakers(None)), Origins([origin]))
    server = PlaneServer(service, host="127.0.0.1", token=token)
    server.start()
    print(json.dumps({"address": server.address, "objects": described}), flush=True)
    sys.stdin.read()
    server.close()
    node.close()
    close_nodes()


if __name__ == "__main__":
    main()
