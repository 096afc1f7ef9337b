"""Where jitter comes from: not from `random` itself, whose state is the user's, seeded and saved for exact resumption."""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
"""Of the operating system, so that forked children do not draw alike. Thread-safe."""
