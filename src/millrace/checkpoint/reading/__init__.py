"""One checkpoint read back, into torch's plans or as plain bytes, whoever wrote it."""
