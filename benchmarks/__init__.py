"""Millrace compared with its alternatives. `python -m benchmarks --list` names the cases, `cases/` holds them."""
