"""Saving: plans, encoding of chunks, deltas, data files, and the writer for `dcp.save`.

Key terms:
- source: the bytes of one item of a save plan.
- chunk: about 1 MiB of one or more items, encoded on its own.
- base: an earlier checkpoint, to which chunks are deltas or references.

A save runs through `writer`, `sources`, `packing` and `encoding`. Then `assembly` joins the ranks'
tables into a manifest. `shared_plan` describes the items of a save to the saver process (`run/saver_process.py`).

Start reading in `writer.py`.
"""
