"""Storage of checkpoints: a directory or a prefix of an object store, tiers of both, and reads of verified chunks.

Key terms:
- storage: the directory of one checkpoint, local or in an object store.
- tier: one of several storages with copies of the same checkpoint, the nearest first.
- orphan: a data file of a killed or failed save, which no manifest lists.

Start reading in `base.py` (the protocol) and `storage.py` (local directories), then `manifests.py` (reading a manifest)
and `fetching.py` (reading chunks). `layered.py` reads from tiers, `replicating.py` copies between them.
"""
