"""A stand-in for the Hugging Face hub: its HTTP interface as far as reading goes, over repositories in memory.

    with HubServer() as hub:
        hub.commit("datasets", "user/things", {"data/train.parquet": data})
        fs = millrace.filesystem("hf", target_options={"endpoint": hub.url})
        fs.cat("hf://datasets/user/things/data/train.parquet")

huggingface_hub's own client is a peer in the tests (tests/integration/origin/test_hub_stand_in.py): it reads the same
objects from this server. What it does as the hub does (2026, as its client expects it):

- models, data sets and spaces; branches, tags and `refs/pr/N`; commits with ids of 40 digits; renamed repositories
- `/api/KIND/OWNER/NAME[/revision/REV]` (with `expand`), `/tree/REV/PATH` (recursive, pages with a `Link`),
  `/paths-info/REV`, `/refs`
- `/OWNER/NAME/resolve/REV/PATH`: small files directly (or over `/api/resolve-cache`) with their git blob id as ETag; files
  of at least `large_bytes` as LFS does, with `X-Linked-Etag` (SHA-256), `X-Linked-Size` and a redirect to another server
  (`cdn`), whose signed addresses expire and which must not see the token
- tokens; private and gated repositories; `X-Error-Code`, and 401 for what an anonymous client may not see

What it does not have: writing, discussions, buckets, Xet (a client with hf_xet falls back to the redirect), `expand=true`
with commits of each file, git itself, rate limits (`service.interfere` can answer 429), and the names and sizes that the
real hub forbids. It was written from its client's source text and was never compared with the real one.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote

from tests.support.http_service import HttpService, Reply, Request
from tests.support.web_server import ranged

_KINDS = "models|datasets|spaces"
_API = re.compile(rf"/api/({_KINDS})/([^/]+/[^/]+)(?:/(revision|tree|paths-info|refs)(?:/([^/]+)(?:/(.*))?)?)?")
_RESOLVE = re.compile(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CACHED = re.compile(rf"/api/resolve-cache/({_KINDS})/([^/]+/[^/]+)/([0-9a-f]{{40}})/(.+)")


@dataclass(frozen=True, slots=True)
class Blob:
    """The content of a file. `oid` is git's; `sha256` is that of a large file, None for a small one."""

    data: bytes = field(repr=False)
    oid: str
    sha256: str | None

    @property
    def tag(self) -> str:
        return self.sha256 or self.oid


@dataclass(frozen=True, slots=True)
class StoredCommit:
    """A commit: all files of the repository as of then."""

    id: str
    files: Mapping[str, Blob]
    date: datetime


@dataclass(slots=True)
class StoredRepository:
    """A repository. Without access, a `private` one is not visible, and of a `gated` one only the files are refused."""

    commits: dict[str, StoredCommit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False


class HubServer:
    """The server, and the CDN next to it. Everything may be changed while it runs; thread-safe.

    `tokens` are those that may see everything. `resolve_cache` sends readers of small files over a second address, as the
    hub does. `service` and `cdn` record the requests.
    """

    def __init__(
        self,
        *,
        tokens: Sequence[str] = (),
        large_bytes: int = 10_000,
        page_size: int = 1000,
        resolve_cache: bool = True,
        address_seconds: float = 3600.0,
    ) -> None:
        self.tokens, self.large_bytes, self.page_size = set(tokens), large_bytes, page_size
        self.resolve_cache, self.address_seconds = resolve_cache, address_seconds
        self._repositories: dict[tuple[str, str], StoredRepository] = {}
        self._renamed: dict[tuple[str, str], str] = {}
        self._large: dict[str, bytes] = {}
        self._signatures: dict[str, tuple[str, float]] = {}
        self._lock = threading.RLock()
        self.cdn = HttpService(self._answer_cdn)
        self.service = HttpService(self._answer)
        self.url, self.host = self.service.url, self.service.host

    # --- contents ---------------------------------------------------------------------------------

    def commit(
        self,
        kind: str,
        name: str,
        files: Mapping[str, bytes | None],
        *,
        branch: str = "main",
        parent: str | None = None,
    ) -> str:
        """Commit `files` (None removes one) on top of a branch, made if need be from `parent`; returns the commit's id."""
        with self._lock:
            repository = self._repositories.setdefault((kind, name), StoredRepository())
            base = repository.branches.get(branch, parent)
            content = dict(repository.commits[base].files) if base else {}
            for path, data in files.items():
                if data is None:
                    content.pop(path, None)
                else:
                    content[path] = self._blob(data)
            commit = hashlib.sha1(
                f"{kind}/{name} {len(repository.commits)} {secrets.token_hex(8)}".encode()
            ).hexdigest()
            repository.commits[commit] = StoredCommit(commit, content, datetime.now(UTC))
            repository.branches[branch] = commit
            return commit

    def squash(self, kind: str, name: str, branch: str = "main") -> str:
        """Replace the history of a branch by one commit with the same files; the commits before are gone."""
        with self._lock:
            repository = self._repositories[kind, name]
            files = {path: blob.data for path, blob in repository.commits[repository.branches[branch]].files.items()}
            repository.commits.clear()
            repository.branches.clear()
            return self.commit(kind, name, files, branch=branch)

    def repository(self, kind: str, name: str) -> StoredRepository:
        """A repository, to hide it or to move its branches."""
        return self._repositories[kind, name]

    def rename(self, kind: str, name: str, new_name: str) -> None:
        """Move a repository; its old name redirects."""
        with self._lock:
            self._repositories[kind, new_name] = self._repositories.pop((kind, name))
            self._renamed[kind, name] = new_name

    def expire_addresses(self) -> None:
        """Make every address of the CDN that was given out invalid."""
        with self._lock:
            self._signatures.clear()

    def _blob(self, data: bytes) -> Blob:
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        if len(data) < self.large_bytes:
            return Blob(data, oid, None)
        sha256 = hashlib.sha256(data).hexdigest()
        self._large[sha256] = data
        return Blob(data, oid, sha256)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.close()
        self.cdn.close()

    # --- answers ----------------------------------------------------------------------------------

    def _answer(self, request: Request) -> Reply:
        with self._lock:
            path = request.raw_path
            if (match := _CACHED.fullmatch(path)) is not None:
                kind, name, revision, file = match[1], match[2], match[3], unquote(match[4])
                return self._file(request, kind, name, revision, file, cached=True)
            if (match := _API.fullmatch(path)) is not None:
                return self._api(
                    request, match[1], match[2], match[3], unquote(match[4] or ""), unquote(match[5] or "")
                )
            if (match := _RESOLVE.fullmatch(path)) is not None:
                kind, name, revision, file = match[1] or "models", match[2], unquote(match[3]), unquote(match[4])
                return self._file(request, kind, name, revision, file, cached=False)
            return _error(404, "", "no such page")

    def _admit(self, request: Request, kind: str, name: str, *, files: bool) -> StoredRepository | Reply:
        """The repository, or why this client gets nothing of it."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            return _error(401, "", "Invalid credentials in Authorization header")
        if (kind, name) in self._renamed:
            new_name = self._renamed[kind, name]
            return Reply(status=307, headers={"Location": request.target.replace(name, new_name, 1)})
        repository = self._repositories.get((kind, name))
        if repository is None or (repository.private and not token):
            if not token:
                return _error(401, "RepoNotFound", "Invalid username or password.")
            return _error(404, "RepoNotFound", "Repository not found")
        if repository.gated and files and not token:
            return _error(401, "GatedRepo", f"Access to {kind} {name} is restricted.")
        return repository

    def _commit(self, repository: StoredRepository, revision: str) -> StoredCommit | None:
        return repository.commits.get(repository.branches.get(revision, revision))

    def _api(self, request: Request, kind: str, name: str, what: str | None, revision: str, path: str) -> Reply:
        repository = self._admit(request, kind, name, files=what == "tree")
        if isinstance(repository, Reply):
            return repository
        if what == "refs":
            branches = [
                {"name": each, "ref": f"refs/heads/{each}", "targetCommit": commit}
                for each, commit in repository.branches.items()
                if not each.startswith("refs/")
            ]
            return _json({"branches": branches, "converts": [], "tags": []})
        commit = self._commit(repository, revision or "main")
        if commit is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if what == "tree":
            return self._tree(request, commit, path)
        if what == "paths-info":
            wanted = parse_qs(request.body.decode()).get("paths", [])
            return _json([entry for each in wanted if (entry := _entry(commit, each.strip("/"))) is not None])
        info: dict[str, Any] = {
            "_id": secrets.token_hex(12),
            "id": name,
            "sha": commit.id,
            "lastModified": _date(commit.date),
        }
        if "expand" not in request.query:
            info |= {"private": repository.private, "gated": repository.gated, "tags": [], "downloads": 0, "likes": 0}
            info["siblings"] = [{"rfilename": each} for each in commit.files]
        return _json(info)

    def _tree(self, request: Request, commit: StoredCommit, path: str) -> Reply:
        below = f"{path}/" if path else ""
        names = {each for each in commit.files if each.startswith(below)}
        if not names and path not in commit.files:
            return _error(404, "EntryNotFound", f"{path} does not exist on this revision")
        if path in commit.files:
            names.add(path)
        recursive = request.query.get("recursive", [""])[0].lower() == "true"
        folders = {each[:at] for each in names for at in range(len(below), len(each)) if each[at] == "/"}
        if not recursive:
            names = {each for each in names if "/" not in each[len(below) :]}
            folders = {each for each in folders if "/" not in each[len(below) :]}
        entries = [*sorted(folders), *sorted(names)]  # directories first
        start = int(request.query.get("cursor", ["0"])[0])
        page = [_entry(commit, each) for each in entries[start : start + self.page_size]]
        headers = {}
        if start + self.page_size < len(entries):
            query = f"recursive={str(recursive).lower()}&expand=false&cursor={start + self.page_size}"
            headers["Link"] = f'<{self.url}{request.raw_path}?{query}>; rel="next"'
        return _json(page, headers)

    def _file(self, request: Request, kind: str, name: str, revision: str, path: str, *, cached: bool) -> Reply:
        repository = self._admit(request, kind, name, files=True)
        if isinstance(repository, Reply):
            return repository
        commit = self._commit(repository, revision)
        if commit is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        blob = commit.files.get(path)
        headers = {"X-Repo-Commit": commit.id}
        if blob is None:
            return _error(404, "EntryNotFound", "Entry not found", headers)
        if blob.sha256 is not None:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
            return Reply(status=302, headers={**headers, "Location": self._signed(blob.sha256)}, body=b"Found")
        if self.resolve_cache and not cached:
            target = f"/api/resolve-cache/{kind}/{name}/{commit.id}/{quote(path)}"
            return Reply(status=307, headers={**headers, "Location": target}, body=b"Temporary Redirect")
        return ranged(request, blob.data, {**headers, "ETag": f'"{blob.oid}"', "Content-Type": "text/plain"})

    # --- the other server -------------------------------------------------------------------------

    def _signed(self, sha256: str) -> str:
        signature = secrets.token_hex(16)
        self._signatures[signature] = (sha256, time.monotonic() + self.address_seconds)
        return f"{self.cdn.url}/xet/{sha256}?Signature={signature}"

    def _answer_cdn(self, request: Request) -> Reply:
        with self._lock:
            sha256, until = self._signatures.get(request.query.get("Signature", [""])[0], ("", 0.0))
            if request.path != f"/xet/{sha256}" or time.monotonic() > until:
                return Reply(status=403, body=b"<Error><Code>AccessDenied</Code></Error>")
            return ranged(request, self._large[sha256], {"ETag": f'"{sha256[:32]}"'})  # another tag than the hub's


def _entry(commit: StoredCommit, path: str) -> dict[str, Any] | None:
    blob = commit.files.get(path)
    if blob is not None:
        entry: dict[str, Any] = {"type": "file", "oid": blob.oid, "size": len(blob.data), "path": path}
        if blob.sha256 is not None:
            entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}
        return entry
    if any(each.startswith(f"{path}/") for each in commit.files):
        return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}
    return None


def _date(date: datetime) -> str:
    return date.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _json(value: object, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(headers={"Content-Type": "application/json", **(headers or {})}, body=json.dumps(value).encode())


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    why = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
    return Reply(
        status=status, headers={**why, "Content-Type": "application/json"}, body=json.dumps({"error": message}).encode()
    )
