"""What people do with a checkpoint that is there: describe, verify, compare and export it."""
