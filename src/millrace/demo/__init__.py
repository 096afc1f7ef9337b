"""The demonstration: speech from object storage, through the cache, into training and out again as checkpoints."""
