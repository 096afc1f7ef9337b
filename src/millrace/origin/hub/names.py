"""Names on the hub: `datasets/owner/name[@revision]/path`, as in the URLs of huggingface_hub. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

from millrace.errors import MillraceError, ObjectNotFoundError, UsageError
from millrace.origin.keys import UNUSABLE_CHARACTERS

DEFAULT_REVISION = "main"

_KINDS = {"datasets": "datasets", "models": "models", "spaces": "spaces"}
_OTHER_KINDS = frozenset({"buckets", "kernels"})
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,96}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Revisions that may be written with slashes.
_SLASHED_REVISION = re.compile(r"refs/(?:convert/[\w.-]+|pr/[0-9]+)(?=/|$)")


@dataclass(frozen=True, slots=True)
class Repository:
    """One repository: `kind` is as in the hub's API (`models`, `datasets`, `spaces`), `name` is `owner/name`."""

    kind: str
    name: str

    @property
    def web_path(self) -> str:
        """The path on the hub's site; models have no prefix there."""
        return self.name if self.kind == "models" else f"{self.kind}/{self.name}"

    @property
    def api_path(self) -> str:
        return f"api/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed key: `path` in a repository at a revision. `root` is the part of the key before the path."""

    repository: Repository
    revision: str
    path: str
    root: str

    @property
    def names_a_commit(self) -> bool:
        """Whether the revision is a full commit id, which never changes."""
        return bool(_COMMIT.fullmatch(self.revision))

    @property
    def url(self) -> str:
        """The URL as the user wrote it."""
        return f"hf://{self.key(self.path)}" if self.path else f"hf://{self.root}"

    def key(self, path: str) -> str:
        """The key of another path in the same repository and revision."""
        return f"{self.root}/{path}"


@lru_cache(maxsize=8192)  # used at every open; the result for a key never changes
def parse_name(key: str) -> HubName:
    """Parse a key. Raises `UsageError` for unsupported kinds of repositories, `ObjectNotFoundError` for an invalid name."""
    key = key.rstrip("/")
    if UNUSABLE_CHARACTERS.search(key):
        raise _no_name(key, "use UTF-8 without control characters")
    first, _, rest = key.partition("/")
    if first in _OTHER_KINDS:
        raise UsageError(
            f"hf://{first}/... is not supported", next_step="use models, data sets (hf://datasets/owner/name) or spaces"
        )
    kind, prefix = (_KINDS[first], f"{first}/") if first in _KINDS else ("models", "")
    body = rest if prefix else key
    owner, slash, rest = body.partition("/")
    name, at, revision_and_path = _split_name(rest)
    if not slash or not _NAME.fullmatch(owner) or not _NAME.fullmatch(name):
        raise _no_name(key, f"write hf://{prefix}owner/name[@revision]/path")
    revision, path = _split_revision(key, revision_and_path) if at else (DEFAULT_REVISION, revision_and_path)
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise _no_name(key, "write its path without '.', '..' and empty parts")
    root = key[: len(key) - len(path) - 1] if path else key
    return HubName(Repository(kind, f"{owner}/{name}"), revision, path, root)


def _split_name(text: str) -> tuple[str, str, str]:
    """The repository's name, `@` if a revision follows, and the rest."""
    name, slash, path = text.partition("/")
    name, at, revision = name.partition("@")
    return (name, at, revision + slash + path) if at else (name, "", path)


def _split_revision(key: str, text: str) -> tuple[str, str]:
    match = _SLASHED_REVISION.match(text)
    revision, _, path = (match[0], "", text[match.end() + 1 :]) if match else text.partition("/")
    revision = unquote(revision, errors="surrogateescape")
    if (
        not revision
        or UNUSABLE_CHARACTERS.search(revision)
        or any(part in ("", ".", "..") for part in revision.split("/"))
    ):
        raise _no_name(key, "write the name of a branch, a tag or a commit after the @")
    return revision, path


def _no_name(key: str, next_step: str) -> MillraceError:
    shown = key.encode("utf-8", "backslashreplace").decode()[:300]
    return ObjectNotFoundError(f"hf://{shown} is not a name on the hub", next_step=next_step)


def file_url(endpoint: str, repository: Repository, revision: str, path: str) -> str:
    """The URL of the bytes of a file, or of a redirect to them."""
    return f"{endpoint}/{repository.web_path}/resolve/{quote(revision, safe='')}/{quote(path)}"


def revision_url(endpoint: str, repository: Repository, revision: str) -> str:
    """The URL of a revision's commit and date, without the names of all files, which the default includes."""
    query = "expand=sha&expand=lastModified"
    return f"{endpoint}/{repository.api_path}/revision/{quote(revision, safe='')}?{query}"


def tree_url(endpoint: str, repository: Repository, commit: str, path: str, *, recursive: bool) -> str:
    """The URL of the listing of a directory of a commit."""
    directory = f"/{quote(path, safe='')}" if path else ""
    return f"{endpoint}/{repository.api_path}/tree/{commit}{directory}?recursive={str(recursive).lower()}&expand=false"
