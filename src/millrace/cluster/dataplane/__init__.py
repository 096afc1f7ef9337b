"""Requests for blocks between nodes: a strict subset of HTTP/1.1 with a checksum after each piece.

Key terms:
- framed body: the requested range, cut at block boundaries, each piece followed by its checksum.
- interim response: a 102 that a node sends while it still fetches.
- token: the shared secret of the cluster, required with every request.

Start reading in `wire.py` (the bytes), then `serving.py` (server) and `client.py`.
"""
