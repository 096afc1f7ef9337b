"""Logins for web servers that users keep in `~/.netrc`, where curl and requests look for them too."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from millrace.events import Event, emit
from millrace.origin.web.options import basic_login


def netrc_header(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The header that signs in at the server of `url`, empty where the file has none for it.

    Each process reads its own file. One that cannot be read is an event, and no login.
    """
    path = Path(environ["NETRC"]) if environ.get("NETRC") else Path("~/.netrc").expanduser()
    try:
        found = netrc.netrc(str(path)).authenticators(urlsplit(url).hostname or "") if os.path.exists(path) else None
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError) as error:
        emit(Event(name="origin.netrc.unusable", subject=str(path), detail=type(error).__name__))
        return {}
    if found is None:
        return {}
    user, _, password = found
    return {"Authorization": basic_login(user, password or "")}
