"""What a user calls a path, and what the origin calls it: its key. Makes no request."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from millrace.errors import UsageError
from millrace.origin.addresses import locate, require_same_place
from millrace.origin.schemes import is_of_fsspec, service_of
from millrace.origin.userinfo import refuse_password

OWN_SCHEME = "millrace"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Paths:
    """The paths of one file system: of its own scheme with all aliases, of `millrace://`, or without a scheme.

    A path of another scheme, account or host is a `UsageError`: what it means here could only be guessed.
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
            from millrace.origin.fsspec_origin.library import class_of

            # Where libraries read a host from a URL, there must be none in front of the path.
            self._begin += class_of(scheme).root_marker

    def strip(self, path: Any) -> Any:
        """What fsspec's `_strip_protocol` gives: the path without a scheme, or a list of them; local ones are absolute."""
        if isinstance(path, list):
            return [self.strip(item) for item in path]
        text = str(path)
        if "://" in text:
            text = self._without_scheme(text)
        if not self.rooted:
            return text.strip("/")  # as what is listed is called, or no pattern would match it
        text = text.rstrip("/") if not text.startswith("/") else "/" + text.strip("/")
        if text.startswith("/") and "/." not in text and "//" not in text:
            return text
        return os.path.abspath(os.path.expanduser(text))

    def key_of(self, path: str) -> str:
        """The origin's name of what a user calls `path`. Local paths are made absolute against the current directory."""
        if self.rooted:
            return str(self.strip(path))
        if isinstance(path, str) and "://" not in path:  # the usual case, in the way of every first open
            key = path.strip("/")
        else:
            key = str(self.strip(path)).strip("/")
        if ":" in key:
            refuse_password(self._scheme, key)
        if self._is_azure and "@" in key:  # pyarrow takes the scheme off, and leaves the account there
            key = self._located(self._scheme, key)
        return key

    def url_of(self, path: str) -> str:
        """The URL of a path, which names the same key."""
        name = str(self.strip(path))
        return f"{self._scheme}://{name}" if self.rooted else self._begin + name.lstrip("/")

    def is_movable(self, path: str) -> bool:
        """Whether `path` is relative, so that it means something else in another directory."""
        return self.rooted and not (self._without_scheme(path) if "://" in path else path).startswith("/")

    def _without_scheme(self, text: str) -> str:
        found = _SCHEME.match(text)
        if found is None:  # a key with "://" further in
            return text
        scheme, rest = found[1], text[found.end() :]
        if scheme == OWN_SCHEME:
            return rest
        if scheme not in self.aliases:
            raise UsageError(
                f"a path of {scheme}:// does not belong to a file system of {self._scheme}://",
                next_step=f"open it with millrace.filesystem({scheme!r}, ...)",
            )
        return self._located(scheme, rest)

    def _located(self, scheme: str, rest: str) -> str:
        if self.rooted:
            return rest
        refuse_password(scheme, rest)
        key, told = locate(scheme, rest)
        require_same_place(told, self._options, self._identity)
        return key


def names_directory(path: Any) -> bool:
    """Whether `path` ends in a slash, and so can only be a directory's. fsspec takes no notice of it, pyarrow does."""
    return str(path).endswith("/")


def without_any_scheme(path: Any, schemes: Iterable[str]) -> str:
    """What fsspec's class method gives, which knows no file system: a path without its scheme where that is one of ours."""
    text = str(path)
    scheme, separator, rest = text.partition("://")
    if separator and (scheme == OWN_SCHEME or scheme in schemes):
        text = rest
    return text.rstrip("/") if not text.startswith("/") else "/" + text.strip("/")
