"""All checkpoints of one training run: saving in the background, retention, tiers, and resuming.

Key terms:
- claim: the right to save into a run, a numbered file in its directory.
- tier: a place with copies of the run's checkpoints: this node's disk, a second node's, the origin.
- timeline: the checkpoints that led to the newest one; a restore of an earlier step abandons the others.

`manager.py` is the public object, and the place to start reading. `run_saver` writes a save, `restoring` loads one,
`pruning` removes checkpoints that `retention` does not keep, `uploading` copies saves to the origin.
"""
