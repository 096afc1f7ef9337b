"""How amounts are written for people."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """An amount of bytes with three digits: `512 B`, `26.1 kB`, `1.20 GB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {units[0]}"
