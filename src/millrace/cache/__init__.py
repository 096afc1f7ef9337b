"""One node's cache: metadata, lookup, fetching and eviction on top of the store.

Key terms:
- `CacheNode`: this process's share of the node's cache: its disks, metadata and threads.
- disk: one store with its eviction records and counters.
- source: where missing blocks come from: the origin, or a peer in a cluster.

Packages: `metadata` (cached listings and object versions), `reading` (lookup, fetch, single flight), `eviction` (usage
records, policy, quotas, pins, TTL).

Start reading in `node.py`.
"""
