"""Bytes of tensors made smaller and back, bit for bit, and how hard to try."""
