"""Reads through the cache: lookup on this disk, then fetches of missing blocks.

Key terms:
- native object: a complete, sealed object that opens as a memory map.
- reader: random access to an object of which some blocks are still missing.
- run: neighbouring missing blocks that one request fetches.

Start reading in `reader.py`, then `locations.py` and `fetching.py`.
"""
