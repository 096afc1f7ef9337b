"""The options of huggingface_hub's file system, and the user's token."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from millrace.errors import ConfigurationError, DeniedError
from millrace.origin.options.store import check_texts, checked_endpoint, is_sendable, reject_unknown, stripped_environ
from millrace.runtime.forks import imported

HUB_OPTIONS = ("endpoint", "token")
# For reads and listings inside huggingface_hub's own file system.
IGNORED_OPTIONS = ("block_size", "expand_info", "live_follow", "max_workers")

_DEFAULT_ENDPOINT = "https://huggingface.co"
_YES = frozenset({"1", "on", "true", "yes"})


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """`endpoint` has no slash at its end. `token` is a string, True (required), None (used if found) or False (not sent)."""

    endpoint: str
    token: str | bool | None = field(default=None, repr=False)


def hub_options(target_options: Mapping[str, Any], environ: Mapping[str, str]) -> HubOptions:
    """Check options of `HfFileSystem`. Raises `ConfigurationError`, without the values."""
    environ = stripped_environ(environ)
    reject_unknown(target_options, (*HUB_OPTIONS, *IGNORED_OPTIONS), "option of the hub:")
    check_texts({"endpoint": target_options.get("endpoint")}, "option of the hub:")
    endpoint = target_options.get("endpoint") or environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT
    parts = urlsplit(checked_endpoint(endpoint, "the hub's endpoint", "a 'token'"))
    token = target_options.get("token")
    if not isinstance(token, str | bool | None) or (isinstance(token, str) and not _sendable(token)):
        raise ConfigurationError("the hub's token cannot be used", next_step="use the text of a token, True or False")
    return HubOptions(endpoint=f"{parts.scheme}://{parts.netloc.lower()}{parts.path}", token=token)


def _sendable(token: str) -> bool:
    return bool(token) and is_sendable(token)


def find_token(given: str | bool | None, environ: Mapping[str, str]) -> str | None:
    """The token to send now; None for none. It may change: sessions of `hf auth login` are renewed.

    Without an explicit token it is searched as in huggingface_hub: HF_TOKEN, then the file of `hf auth login`. Raises
    `DeniedError` if a required token is missing.
    """
    if isinstance(given, str):
        return given
    if given is False or (given is None and environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in _YES):
        return None
    token = _users_token(environ)
    if token is None and given is True:
        raise DeniedError("no token of the Hugging Face hub was found", next_step="set HF_TOKEN or `hf auth login`")
    if token is not None and not _sendable(token):  # otherwise the request would be anonymous
        raise ConfigurationError(
            "the hub's token (HF_TOKEN, or the file of `hf auth login`) contains a space or a character that is not ASCII",
            next_step="set HF_TOKEN again, or `hf auth login`",
        )
    return token


def _users_token(environ: Mapping[str, str]) -> str | None:
    token = (environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or "").strip()
    has_other_places = bool(environ.get("HF_OIDC_RESOURCE")) or "google.colab" in sys.modules
    if token and not has_other_places:
        return token
    path = _token_path(environ)
    if not has_other_places and not path.exists():
        return None  # avoids the import, which is slower than many reads
    if importlib.util.find_spec("huggingface_hub") is None:  # it renews sessions
        return token or _token_of_file(path)
    try:
        hub: Any = imported("huggingface_hub.utils")  # this module imports all its attributes at once
        token = hub.get_token()
        return token if token is None else str(token)
    except Exception as error:
        raise DeniedError(
            f"the token of the Hugging Face hub cannot be obtained ({type(error).__name__})",
            next_step="set HF_TOKEN or `hf auth login`",
        ) from error


def _token_path(environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser()


def _token_of_file(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DeniedError(f"the token in {path} cannot be read", next_step="`hf auth login`") from error
