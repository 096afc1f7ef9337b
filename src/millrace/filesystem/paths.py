"""Translates the paths of users to keys of the origin and back. Sends no request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fsspec.utils import stringify_path

from millrace.config import absolute_path
from millrace.errors import ObjectNotFoundError, UsageError
from millrace.origin.addresses import locate, require_same_place
from millrace.origin.keys import UNUSABLE_CHARACTERS
from millrace.origin.schemes import is_of_fsspec, refuse_password, service_of
from millrace.runtime.forks import importing

OWN_SCHEME = "millrace"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Paths:
    """The paths of one file system: with its own scheme or an alias, with `millrace://`, or without a scheme.

    A path with another scheme, account or host raises `UsageError`, because its meaning would be a guess.
    """

    def __init__(self, scheme: str, options: Mapping[str, Any], identity: str) -> None:
        service = service_of(scheme)
        self.aliases = service.aliases
        self.rooted = service.rooted
        """Whether keys are absolute paths of this machine rather than bucket/key."""
        self._scheme, self._options, self._identity = scheme, dict(options), identity
        self._is_azure = service.scheme == "az"
        self._begin = f"{scheme}://"
        if is_of_fsspec(service):
            with importing():
                from millrace.origin.fsspec_origin.clients import class_of

            # Libraries that read a host from a URL must find none before the path.
            self._begin += class_of(scheme).root_marker

    def strip(self, path: Any) -> Any:
        """The result of fsspec's `_strip_protocol`: a path or a list of paths without schemes; local ones are absolute."""
        if isinstance(path, list):
            return [self.strip(item) for item in path]
        text = text_of(path)
        if "://" in text:
            text = self._without_scheme(text)
        if not self.rooted:
            return text.strip("/")  # like listed names, or no pattern would match
        text = text.rstrip("/") if not text.startswith("/") else "/" + text.strip("/")
        if text.startswith("/") and "/." not in text and "//" not in text:
            return text
        return absolute_path(text)

    def key_of(self, path: str) -> str:
        """The key of `path` at the origin. A relative local path is resolved against the current directory.

        Raises `ObjectNotFoundError` for control characters and text that is not UTF-8: no origin has such a name, and the
        pages of the metadata use them.
        """
        if self.rooted:
            return _usable(str(self.strip(path)), self._begin)
        if isinstance(path, str) and "://" not in path:  # the usual case, on the path of every first open
            key = path.strip("/")
        else:
            key = str(self.strip(path)).strip("/")
        if ":" in key:
            refuse_password(self._scheme, key)
        if self._is_azure and "@" in key:  # pyarrow removes the scheme and keeps the account
            key = self._located(self._scheme, key)
        return _usable(key, self._begin)

    def normalized(self, path: str) -> str:
        """The path without its scheme, as pyarrow's `normalize_path` returns it. A relative local path stays relative."""
        if not self.rooted:
            return self.key_of(path)
        text = text_of(path)
        return self._without_scheme(text) if "://" in text else text

    def url_of(self, path: str) -> str:
        """The URL of a path, with the same key."""
        name = str(self.strip(path))
        return f"{self._scheme}://{name}" if self.rooted else self._begin + name.lstrip("/")

    def is_movable(self, path: str) -> bool:
        """Whether `path` is relative, so that its meaning depends on the current directory."""
        return self.rooted and not self.normalized(path).startswith("/")

    def _without_scheme(self, text: str) -> str:
        found = _SCHEME.match(text)
        if found is None:  # a key that contains "://"
            return text
        scheme, rest = found[1].lower(), text[found.end() :]
        if scheme == OWN_SCHEME:
            return rest
        if scheme not in self.aliases:
            raise UsageError(
                f"{scheme}:// paths do not belong to a file system of {self._scheme}://",
                next_step=f"open it with millrace.filesystem({scheme!r}, ...)",
            )
        return self._located(scheme, rest)

    def _located(self, scheme: str, rest: str) -> str:
        if self.rooted:
            return rest
        refuse_password(scheme, rest)
        key, place = locate(scheme, rest)
        require_same_place(place, self._options, self._identity)
        return key


def text_of(path: Any) -> str:
    """The text of a path, which may be an `os.PathLike`, as for fsspec. Raises `UsageError` for anything else."""
    if isinstance(path, str):
        return path
    text = stringify_path(path)
    if not isinstance(text, str):
        raise UsageError(f"{path!r:.200} is not a path", next_step="give a text or a pathlib.Path")
    return text


def _usable(key: str, begin: str) -> str:
    """`key`, if an object can have this name; `isprintable` is the quick test."""
    if not key.isprintable() and UNUSABLE_CHARACTERS.search(key):
        raise unusable_name(begin + key)
    return key


def unusable_name(name: str) -> ObjectNotFoundError:
    """The error for a name with control characters, or that is not UTF-8."""
    return ObjectNotFoundError(f"{name} is not a valid object name", next_step="use UTF-8 without control characters")


def names_directory(path: Any) -> bool:
    """Whether `path` ends in a slash, and so can only name a directory."""
    return str(path).endswith("/")


def without_any_scheme(path: Any, schemes: Iterable[str]) -> str:
    """A path without its scheme, if that is one of `schemes`. For fsspec's class method, which has no file system."""
    text = str(path)
    scheme, separator, rest = text.partition("://")
    if separator and (scheme.lower() == OWN_SCHEME or scheme.lower() in schemes):
        text = rest
    return text.rstrip("/") if not text.startswith("/") else "/" + text.strip("/")


def is_pattern(key: str, origin_identity: str, *, wildcards: str = "*?[") -> bool:
    """Whether `key` contains a wildcard. The '?' of a web address begins its query and is not a wildcard."""
    if "?" in key and origin_identity in ("http", "https"):
        return False
    return any(each in key for each in wildcards)
