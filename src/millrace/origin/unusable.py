"""What no key may have in it, whatever the storage: it would name something else there, or nothing. Pure."""

from __future__ import annotations

import re

CHARACTERS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and bytes that were no UTF-8, as Python keeps them in a string."""

IN_PATHS = re.compile(rf"{CHARACTERS.pattern}|(?:^|/)\.{{0,2}}(?:/|$)")
"""Also parts that a URL would resolve away, and a storage with directories follow elsewhere: empty ones, `.` and `..`."""
