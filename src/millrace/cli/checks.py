"""What a check of `millrace doctor` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at. `note` is worth knowing and no failure."""

    name: str
    state: Literal["ok", "note", "failed"]
    detail: str
