"""Millrace beside its alternatives. `python -m benchmarks --list` names the cases, `cases/` holds them."""
