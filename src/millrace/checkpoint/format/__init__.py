"""The checkpoint format: manifest, tables, layout of chunks, chains of deltas, slices of tensors. Pure; no torch, no I/O.

Key terms:
- item: a stored shard of a tensor, or an object.
- chunk: about 1 MiB of one or more items, encoded on its own.
- chain: a delta chunk, its base, the base of that, and so on to the root, which is not a delta.

Start reading in `manifest.py`. `docs/reference/checkpoint-format.md` describes the format byte by byte.
"""
