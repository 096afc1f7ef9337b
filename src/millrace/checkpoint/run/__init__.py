"""All checkpoints of one training run: their names and order, which of them stay, who may save, and in which places."""
