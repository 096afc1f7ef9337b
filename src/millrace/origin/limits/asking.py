"""Asks an origin that is busy for how long, where its library does not show the header `Retry-After`."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # else by the thread that looks up the host, see `origin.importing`
import http.client
import ssl
import time
from urllib.parse import urlsplit

from millrace.errors import MillraceError
from millrace.origin.limits.retry_after import parse_retry_after
from millrace.origin.protocol import Origin

_SECONDS = 3.0
_BUSY = (429, 503)


def ask_retry_after(origin: Origin, key: str) -> float | None:
    """One request for the first byte of `key`, for the header of its answer; None where there is none, or no way to ask.

    Of use for origins with `signed_url`, whose library (obstore) reads the header but gives it on to nobody. Takes a
    few seconds at most. Raises nothing: what goes wrong here was told already, by the answer that was the reason to ask.
    """
    sign = getattr(origin, "signed_url", None)
    try:
        url: str | None = sign(key) if sign is not None else None
        return _ask(url) if url is not None else None
    except (MillraceError, OSError, http.client.HTTPException, ValueError):
        return None


def _ask(url: str) -> float | None:
    # Neither urllib3 nor a shared connection: the URL is signed, and must not get into any library's log.
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port, timeout=_SECONDS, context=ssl.create_default_context())
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port, timeout=_SECONDS)
    )
    try:
        connection.request("GET", f"{parts.path}?{parts.query}", headers={"Range": "bytes=0-0"})
        answer = connection.getresponse()
        if answer.status not in _BUSY:
            return None
        return parse_retry_after(answer.headers.get("Retry-After"), time.time())
    finally:
        connection.close()
