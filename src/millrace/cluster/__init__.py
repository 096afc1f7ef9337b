"""Many nodes as one cache: placement, reads from peers, copies of hot blocks, drain and refill.

Key terms:
- member: a live node of the cluster.
- owner: the member that placement assigns a block to; it fetches the block from the origin once for all.
- view: the members at one moment.
- breaker: stops requests to a peer that failed until it responds again.

Packages: `membership` (which nodes are members), `dataplane` (requests for blocks between nodes).

Start reading in `source.py` (a read from a peer), then `owning.py` (the owner's side).
"""
