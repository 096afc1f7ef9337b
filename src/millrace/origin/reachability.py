"""Finds why an endpoint cannot be reached: connection refused, unknown host, TLS on a plain port, and so on.

obstore reports all of these as one error without the cause. So after a request without a response, a separate connection
finds the cause. `millrace doctor URL` uses the same function.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # otherwise imported by the thread that looks up the host, see `runtime.forks`
import errno
import os
import socket
import ssl
import time
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from millrace.errors import OriginUnavailableError
from millrace.runtime.forks import imported

BRIEF_SECONDS = 5.0
"""How long a request is retried for a temporary cause if the endpoint has not responded lately."""

_PROBE_SECONDS = 3.0
_KEPT_SECONDS = 1.0
_PAUSE_SECONDS = 0.25
_MOST_KEPT = 1024
_PORTS = {"http": 80, "https": 443}
_UNROUTED = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL})
_WRONG_HOST = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
_PLAIN_ANSWER = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"})


class Cause(NamedTuple):
    """The cause in words, and the next step.

    `seconds`: how long a request is retried if the endpoint has not responded lately; 0 for a permanent cause, None for as
    long as for any other failure.
    """

    text: str
    next_step: str
    seconds: float | None

    def error(self, problem: str) -> OriginUnavailableError:
        """Our error for a request that failed for this cause; `problem` starts with the subject."""
        failed = OriginUnavailableError(f"{problem} ({self.text})", next_step=self.next_step)
        failed.brief_seconds = self.seconds
        return failed


def cause_of(error: BaseException, where: str = "the server") -> Cause | None:
    """The cause behind an exception or one of its causes, if any. `where` names the server in the text. Pure."""
    return next((cause for each in _chain(error) if (cause := _cause(each, where)) is not None), None)


def _cause(error: BaseException, where: str) -> Cause | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the certificate of {where} is not trusted: {error.verify_message}"
        return Cause(
            text, "check the name of the host, and the certificates that this machine trusts (SSL_CERT_FILE)", 0.0
        )
    if isinstance(error, ssl.SSLError) and error.reason:
        if error.reason in _PLAIN_ANSWER:
            return Cause(f"{where} does not use TLS", "write http:// instead of https:// if that is acceptable", 0.0)
        return Cause(f"the TLS handshake with {where} failed: {error.reason}", "check the address and its port", 0.0)
    if isinstance(error, socket.gaierror):
        if error.errno in _WRONG_HOST:
            return Cause(f"unknown host: {where}", "check the address for mistakes", 0.0)
        return Cause(f"the name of {where} cannot be looked up now", "check this machine's DNS", BRIEF_SECONDS)
    if isinstance(error, ConnectionRefusedError):
        return Cause(f"connection refused by {where}", "check the port, and that the server is running", BRIEF_SECONDS)
    if isinstance(error, OSError) and error.errno in _UNROUTED:
        return Cause(f"no route to {where}", "check the network of this machine", BRIEF_SECONDS)
    if isinstance(error, TimeoutError):
        return Cause(
            f"no response from {where} in time", "check the address, firewalls, and that the server is up", None
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and all its causes; some libraries have these only among the arguments."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__context__, each.__cause__, *(arg for arg in each.args if isinstance(arg, BaseException))]


def probe(url: str, *, seconds: float = _PROBE_SECONDS, detect_tls: bool = True) -> Cause | None:
    """Connect to the server of `url`, with TLS for https, and return why it cannot be reached; None for a success.

    Sends no request. With `detect_tls` a server that expects TLS is recognized behind an http URL, too. Takes `seconds` for
    each step. Connects to the proxy if the environment names one.
    """
    try:
        via = proxy_of(url)
        parts = urlsplit(via or url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443)
    except ValueError:
        return Cause("the address or its port is not valid", "write http://host:port with a port up to 65535", 0.0)
    where = f"{'the proxy ' if via else ''}{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            if parts.scheme == "https":
                trusted_context().wrap_socket(connection, server_hostname=host).close()
    except UnicodeError:  # before any DNS query: an empty part, or more than 63 characters
        return Cause(f"{where} is not a valid host name", "check the address for mistakes", 0.0)
    except (OSError, ValueError, ImportError) as error:  # also without trusted certificates
        return cause_of(error, where)
    if parts.scheme == "http" and not via and detect_tls and _expects_tls(host, port, seconds):
        return Cause(f"{where} expects TLS", "write https:// instead of http://", 0.0)
    return None


def _expects_tls(host: str, port: int, seconds: float) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            context.wrap_socket(connection, server_hostname=host).close()
    except (OSError, ValueError):
        return False
    return True


def proxy_of(url: str) -> str:
    """The environment's proxy for `url`; empty for none."""
    parts, library = urlsplit(url), imported("urllib.request")
    proxy: str = library.getproxies_environment().get(parts.scheme, "").strip()
    if not proxy or library.proxy_bypass_environment(parts.netloc):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def trusted_context() -> ssl.SSLContext:
    """A TLS context that trusts the system's certificates, or certifi's in an image that has none."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and not _has_hashed_certificates():
        context.load_verify_locations(imported("certifi").where())
    return context


def _has_hashed_certificates() -> bool:
    """Whether the system has certificates in single files, which OpenSSL reads when it needs one."""
    folder = ssl.get_default_verify_paths().capath
    return bool(folder and os.path.isdir(folder) and os.listdir(folder))


# By server, of this process: the result of the last probe and its expiry, and the servers that have responded.
_found: dict[str, tuple[float, Cause | None]] = {}
_responded: set[str] = set()


def diagnose(url: str, *, seconds: float = _PROBE_SECONDS) -> Cause | None:
    """As `probe`, for a request without a response. The result is reused for a second, by all threads.

    Takes at most `seconds` for each step, and never more than by default.
    """
    server = _server_of(url)
    until, cause = _found.get(server, (0.0, None))
    if time.monotonic() >= until:
        if len(_found) >= _MOST_KEPT:
            _found.clear()
        cause = probe(url, seconds=min(seconds, _PROBE_SECONDS), detect_tls=server not in _responded)
        _found[server] = (time.monotonic() + _KEPT_SECONDS, cause)
    return cause


def first_contact(url: str) -> Cause | None:
    """Why the server of `url` cannot be reached; None if it can. For use before requests that a library retries for long.

    Waits for a temporary cause. A server that has responded to this process before is not checked.
    """
    began = time.monotonic()
    while _server_of(url) not in _responded:
        cause = diagnose(url)
        if cause is None or cause.seconds is None:
            break
        if time.monotonic() - began >= cause.seconds:
            return cause
        time.sleep(_PAUSE_SECONDS)
    return None


def note_response(url: str) -> None:
    """Record that the server of `url` has responded to this process, so the scheme of its address is right."""
    server = _server_of(url)
    if server not in _responded:
        if len(_responded) >= _MOST_KEPT:
            _responded.clear()
        _responded.add(server)


def _server_of(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"
