"""What a checkpoint's files say: the manifest, its tables, and what follows from them. Pure; no torch, no I/O."""
