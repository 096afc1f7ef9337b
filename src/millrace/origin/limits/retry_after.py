"""The header `Retry-After`: what it says, in seconds."""

from __future__ import annotations

from email.utils import parsedate_to_datetime


def parse_retry_after(header: str | None, now: float) -> float | None:
    """How many seconds the header asks for: a number, or an HTTP date compared with `now` (Unix seconds).

    None where there is no header, or none that can be understood. A date that has passed is 0.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
        return None if moment.tzinfo is None else max(0.0, moment.timestamp() - now)
    except (ValueError, OverflowError):
        return None  # what the standard does not allow says nothing
