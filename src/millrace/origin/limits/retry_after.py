"""The response header `Retry-After`: parse it, and request it again when the origin's library hides it."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # otherwise imported by the thread that looks up the host, see `runtime.forks`
import http.client
import ssl
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from millrace.errors import MillraceError
from millrace.origin.protocol import Origin

_SECONDS = 3.0
_BUSY = (429, 503)


def parse_retry_after(header: str | None, now: float) -> float | None:
    """The seconds that the header requests: a number, or an HTTP date compared with `now` (Unix seconds). Pure.

    None for no header and for an invalid one; 0 for a date in the past.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
        return None if moment.tzinfo is None else max(0.0, moment.timestamp() - now)
    except (ValueError, OverflowError):
        return None


def request_retry_after(origin: Origin, key: str) -> float | None:
    """Request the first byte of `key` and return the header's seconds; None without the header or a signed URL.

    For origins with `signed_url`, whose library (obstore) does not return the header. Takes a few seconds at most. Raises
    nothing: the response that was the reason for this request has reported the problem.
    """
    sign = getattr(origin, "signed_url", None)
    try:
        url: str | None = sign(key) if sign is not None else None
        return _request(url) if url is not None else None
    except (MillraceError, OSError, http.client.HTTPException, ValueError):
        return None


def _request(url: str) -> float | None:
    # Not with urllib3 or a shared connection: the URL is signed and must not appear in the log of a library.
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port, timeout=_SECONDS, context=ssl.create_default_context())
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port, timeout=_SECONDS)
    )
    try:
        connection.request("GET", f"{parts.path}?{parts.query}", headers={"Range": "bytes=0-0"})
        response = connection.getresponse()
        if response.status not in _BUSY:
            return None
        return parse_retry_after(response.headers.get("Retry-After"), time.time())
    finally:
        connection.close()
