"""Cached metadata of the origin: object versions and listings.

Key terms:
- page: a sorted run of keys of one listing, as one index entry.
- freshness: how old a cached entry may be before the origin is requested again (the option `consistency`).
- invalidation: a write that removes the cached metadata of its key on every node.

Start reading in `metadata.py`, then `page_map.py` and `sources.py`.
"""
