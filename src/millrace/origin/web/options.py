"""Checks the options of fsspec's HTTP file system, and reads the user's `~/.netrc`."""

from __future__ import annotations

import base64
import netrc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from millrace.errors import ConfigurationError
from millrace.events import Event, emit
from millrace.origin.options.store import checked_mapping, reject_unknown
from millrace.runtime.failures import reason_of

SILENCE_SECONDS = 20.0
"""A server that sends nothing for this time has stalled."""

WEB_OPTIONS = ("auth", "client_kwargs", "cookies", "headers", "ssl", "timeout", "verify")
CLIENT_KWARGS = ("auth", "cookies", "headers", "timeout", "trust_env")
# For reads inside fsspec's own files, which the cache replaces.
IGNORED_OPTIONS = ("block_size", "cache_options", "cache_type")

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t -~\xa0-\xff]*")  # possible in a header
_OURS = ("connection", "content-length", "host", "if-", "range", "te", "transfer-encoding")
_TO_ANY_SERVER = ("accept", "accept-language", "user-agent")


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """The options of requests to web servers.

    `headers` go only to the server that a key names, `open_headers` also to the targets of redirects. `verify` is False for
    unchecked certificates, or the path of the trusted ones. `timeout_seconds` is the longest silence. With
    `trusts_environment`, the environment's proxies and the user's netrc are used.
    """

    headers: Mapping[str, str] = field(repr=False)
    open_headers: Mapping[str, str] = field(repr=False)
    verify: bool | str = True
    timeout_seconds: float = SILENCE_SECONDS
    trusts_environment: bool = True

    @property
    def signs_in(self) -> bool:
        """Whether there is an explicit password or token, so that the netrc is not used."""
        return any(name.lower() == "authorization" for name in self.headers)


def web_options(target_options: Mapping[str, Any]) -> WebOptions:
    """Check and normalize `target_options` of fsspec's HTTP file system.

    Raises `ConfigurationError` for an unknown option and for an unusable value, without the value.
    """
    reject_unknown(target_options, (*WEB_OPTIONS, *IGNORED_OPTIONS), "HTTP option")
    client = checked_mapping(target_options.get("client_kwargs"), "HTTP option 'client_kwargs'")
    reject_unknown(client, CLIENT_KWARGS, "entry in client_kwargs:")

    def either(name: str) -> Any:
        value = target_options.get(name)
        return client.get(name) if value is None else value

    headers = {
        **_strings(client.get("headers"), "headers"),
        **_strings(target_options.get("headers"), "headers"),
    }
    for name in headers:
        _check_header(name, headers[name])
    login = _login(either("auth"))
    if login is not None:
        if any(name.lower() == "authorization" for name in headers):
            raise ConfigurationError(
                "'auth' and a header Authorization exclude each other", next_step="set one of them"
            )
        headers["Authorization"] = login
    cookies = _strings(either("cookies"), "cookies")
    if cookies:
        if any(name.lower() == "cookie" for name in headers):
            raise ConfigurationError("'cookies' and a header Cookie exclude each other", next_step="set one of them")
        headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        if any(
            not _TOKEN.fullmatch(name) or ";" in value or not _VALUE.fullmatch(value) for name, value in cookies.items()
        ):
            raise ConfigurationError("a cookie has characters that no cookie can have", next_step="encode its value")
    return WebOptions(
        headers=headers,
        open_headers={name: value for name, value in headers.items() if name.lower() in _TO_ANY_SERVER},
        verify=_verify(target_options),
        timeout_seconds=_timeout(either("timeout")),
        trusts_environment=_trusts_environment(client.get("trust_env")),
    )


def _strings(value: Any, what: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise ConfigurationError(f"HTTP option {what!r} is not a mapping of strings", next_step="use a dict of strings")
    return dict(value)


def _check_header(name: str, value: str) -> None:
    if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise ConfigurationError(f"HTTP header {name!r} cannot be sent", next_step="use printable characters")
    lower = name.lower()
    if lower.startswith(_OURS) or (lower == "accept-encoding" and value.strip().lower() != "identity"):
        raise ConfigurationError(f"HTTP header {name!r} is set by Millrace", next_step="remove it from 'headers'")


def _login(auth: Any) -> str | None:
    """The header for (user, password), a pair or an object of aiohttp or requests with these names."""
    if auth is None:
        return None
    if isinstance(auth, str) or not isinstance(auth, tuple | list):
        user, password = getattr(auth, "login", getattr(auth, "username", None)), getattr(auth, "password", None)
    else:
        user, password = (*auth, None, None)[:2]
    if not isinstance(user, str) or not isinstance(password, str) or ":" in user:
        raise ConfigurationError("HTTP option 'auth' is not a pair of strings", next_step="use (user, password)")
    return basic_login(user, password)


def basic_login(user: str, password: str) -> str:
    """The value of the header `Authorization` for a user name and a password."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _verify(options: Mapping[str, Any]) -> bool | str:
    verify, ssl = options.get("verify"), options.get("ssl")
    if verify is not None and ssl is not None:
        raise ConfigurationError("HTTP options 'verify' and 'ssl' exclude each other", next_step="set 'verify'")
    value = verify if ssl is None else ssl
    if value is None:
        return True
    if not isinstance(value, bool | str) or value == "":
        raise ConfigurationError(
            "HTTP option 'verify' is neither True, False nor a path",
            next_step="use the path of a file with certificates",
        )
    return value


def _trusts_environment(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError("HTTP option 'trust_env' is neither True nor False", next_step="set one of them")
    return value is not False


def _timeout(value: Any) -> float:
    seconds = getattr(value, "sock_read", None) or getattr(value, "total", None) or value
    if seconds is None:
        return SILENCE_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigurationError("HTTP option 'timeout' is not a number of seconds above 0", next_step="use 20 or more")
    return float(seconds)


def netrc_header(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The header with the login for the server of `url` from the user's netrc; empty if there is none.

    An unreadable file is an event, and no login.
    """
    path = Path(environ["NETRC"]) if environ.get("NETRC") else Path("~/.netrc").expanduser()
    try:
        found = netrc.netrc(str(path)).authenticators(urlsplit(url).hostname or "") if os.path.exists(path) else None
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError) as error:
        # The text of another error may contain a password.
        reason = reason_of(error) if isinstance(error, OSError) else "it is not valid"
        emit(Event(name="origin.netrc.unusable", subject=str(path), detail=reason))
        return {}
    if found is None:
        return {}
    user, _, password = found
    return {"Authorization": basic_login(user, password or "")}
