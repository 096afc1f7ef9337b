"""The response header `Retry-After`: parse it, and request it again when the origin's library hides it."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # otherwise imported by the thread that looks up the host, see `runtime.forks`
import http.client
import socket
import ssl
import threading
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
    except (MillraceError, OSError, http.client.HTTPException, RuntimeError, ValueError):
        return None  # a `RuntimeError` of a thread that cannot start


def _request(url: str) -> float | None:
    # Not with urllib3 or a shared connection: the URL is signed and must not appear in the log of a library.
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port, timeout=_SECONDS, context=ssl.create_default_context())
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port, timeout=_SECONDS)
    )
    # The timeout of a socket begins again with every byte.
    late = threading.Timer(_SECONDS, lambda: _end(connection.sock))
    late.daemon = True
    try:
        connection.request("GET", f"{parts.path}?{parts.query}", headers={"Range": "bytes=0-0"})
        late.start()
        response = connection.getresponse()
        if response.status not in _BUSY:
            return None
        return parse_retry_after(response.headers.get("Retry-After"), time.time())
    finally:
        late.cancel()
        connection.close()


def _end(sock: socket.socket | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):  # closed meanwhile
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not that of TLS, after which bytes are read without it
