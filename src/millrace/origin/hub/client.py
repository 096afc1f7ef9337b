"""The hub's HTTP interface: which commit a revision is, what a file is, what a directory holds, the bytes of a range.

These are the requests of huggingface_hub (2.4), sent over connections of our own: its client repeats what is refused by
itself, which would multiply with the retries of the node and pass by its limits.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urljoin

from typing_extensions import Buffer

from millrace import _version
from millrace.errors import DeniedError, MillraceError, ObjectNotFoundError, OriginUnavailableError
from millrace.origin.hub.names import Repository, file_url, revision_url, tree_url
from millrace.origin.hub.options import HubOptions, find_token
from millrace.origin.turns import FREE, Turns
from millrace.origin.web.addresses import redirected, same_server, shown
from millrace.origin.web.answers import check_encoding, content_length, content_range, number, refusal
from millrace.origin.web.bodies import announced_range, exact_body, outside
from millrace.origin.web.connections import Answer, Connections

Result = TypeVar("Result")

_MOST_JSON_BYTES = 64 << 20
_MOST_UNASKED_BYTES = 64 << 20
_NEXT_PAGE = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_COMMIT = re.compile(r"[0-9a-f]{40}")
_GONE_ROUTE = frozenset({400, 401, 403, 404, 410})


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit, and when the repository was last changed as of it, in Unix seconds."""

    id: str
    modified: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a tree with its content's id (`version`), or a directory without one."""

    path: str
    size: int
    version: str | None


@dataclass(frozen=True, slots=True)
class Described:
    """A file of a commit; `route` is where its bytes are when that is another server."""

    commit: str
    version: str
    size: int
    route: str | None


class RouteGoneError(Exception):
    """An address that the hub gave out holds no longer: ask it for another one. Never leaves the origin."""


class HubClient:
    """Sends the requests of one origin. Thread-safe; for one process.

    `subject` is the URL that the user reads, which errors name. Each request takes one of `turns`.
    """

    def __init__(self, options: HubOptions, turns: Turns = FREE) -> None:
        self._options = options
        self._turns = turns
        self._connections = Connections()

    # --- what is there ----------------------------------------------------------------------------

    def commit(self, repository: Repository, revision: str, subject: str) -> Commit:
        """The commit that `revision` names now. Raises `ObjectNotFoundError`, `DeniedError`."""

        def commit_of(answer: Answer) -> Commit:
            told = self._json(answer, repository, subject)
            commit = told.get("sha") if isinstance(told, dict) else None
            if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
                raise _nonsense(answer)
            return Commit(commit, _seconds(told.get("lastModified")))

        return self._ask("GET", revision_url(self._options.endpoint, repository, revision), commit_of)

    def describe(self, repository: Repository, revision: str, path: str, subject: str) -> Described:
        """What a file is, and of which commit, by one request. Raises `ObjectNotFoundError`, `DeniedError`."""
        return self._ask(
            "HEAD",
            file_url(self._options.endpoint, repository, revision, path),
            lambda answer: self._described(answer, repository, revision, subject),
        )

    def tree(
        self, repository: Repository, commit: str, path: str, subject: str, *, recursive: bool
    ) -> Iterator[Sequence[Entry]]:
        """The directory `path` of a commit, in pages, in no particular order; one request for each page that is taken.

        Each page is tried again by itself. Raises `ObjectNotFoundError` where there is no such directory.
        """

        def page_of(answer: Answer) -> tuple[list[Entry], str | None]:
            told = self._json(answer, repository, subject)
            following = _NEXT_PAGE.search(answer.headers.get("Link", ""))
            try:
                page = [_entry(each) for each in told if each["type"] in ("file", "directory")]
            except (KeyError, TypeError, ValueError) as error:
                raise _nonsense(answer) from error
            url = urljoin(answer.url, following[1]) if following else None
            if url is not None and not same_server(url, self._options.endpoint):
                raise _nonsense(answer)
            return page, url

        url: str | None = tree_url(self._options.endpoint, repository, commit, path, recursive=recursive)
        while url is not None:
            ask = functools.partial(self._ask, "GET", url, page_of)
            page, url = self._turns.retrying(subject, ask)
            yield page

    # --- bytes ------------------------------------------------------------------------------------

    def read(
        self, repository: Repository, commit: str, path: str, subject: str, start: int, stop: int, version: str | None
    ) -> tuple[Described, Buffer | None]:
        """What the file of a commit is, and the range of it where the hub has that itself.

        None instead of bytes where another server has them (`route`), or where the version is not the wanted one. Raises
        `UsageError` for a range that ends past the end.
        """
        url = file_url(self._options.endpoint, repository, commit, path)

        def is_elsewhere(described: Described) -> bool:
            if version is not None and described.version != version:
                return True
            if stop > described.size:
                raise outside(subject, start, stop, described.size)
            return described.route is not None

        def use(answer: Answer) -> tuple[Described, Buffer | None] | None:
            if answer.status == 416:
                return None
            described = self._described(answer, repository, commit, subject)
            if is_elsewhere(described):
                return described, None
            return described, self._range(answer, url, start, stop, described.size)

        got = self._ask("GET", url, use, {"Range": f"bytes={start}-{stop - 1}"})
        if got is None:
            described = self.describe(repository, commit, path, subject)
            if not is_elsewhere(described):
                raise OriginUnavailableError(f"{shown(url)} refuses a range inside the file", next_step="read again")
            got = described, None
        return got

    def read_route(self, url: str, start: int, stop: int, size: int) -> Buffer:
        """The range from the server that the hub sends readers to. Raises `RouteGoneError`."""

        def use(answer: Answer) -> Buffer | None:
            if answer.status in _GONE_ROUTE:
                return None
            if answer.status not in (200, 206):
                raise refusal(answer.status, answer.headers, answer.url, time.time())
            return self._range(answer, answer.url, start, stop, size)

        headers = {"Range": f"bytes={start}-{stop - 1}"}
        data = self._connections.ask("GET", url, lambda _: headers, use, turns=self._turns)
        if data is None:
            raise RouteGoneError
        return data

    def _range(self, answer: Answer, url: str, start: int, stop: int, size: int) -> Buffer:
        check_encoding(answer.headers, url)
        if answer.status == 206:
            _, total = announced_range(answer, url, start, stop)
            if total != size:
                raise OriginUnavailableError(
                    f"{shown(url)} has {total} bytes instead of {size}", next_step="read again"
                )
            return exact_body(answer, url, start, stop)
        if answer.status != 200 or size > _MOST_UNASKED_BYTES:
            raise OriginUnavailableError(f"{shown(url)} is not served by ranges", next_step="ask the hub's operator")
        return memoryview(exact_body(answer, url, 0, size))[start:stop]

    # --- requests and answers ---------------------------------------------------------------------

    def _ask(
        self, method: str, url: str, use: Callable[[Answer], Result], extra: Mapping[str, str] | None = None
    ) -> Result:
        """What `use` makes of the hub's answer while that has its turn.

        The hub may send us elsewhere within itself. Another server's address is the answer, not followed.
        """
        token = find_token(self._options.token, os.environ)

        def headers(target: str) -> Mapping[str, str]:
            mine = {"User-Agent": f"millrace/{_version.__version__}", **(extra or {})}
            if token is not None and same_server(target, self._options.endpoint):
                mine["Authorization"] = f"Bearer {token}"
            return mine

        return self._connections.ask(
            method,
            url,
            headers,
            use,
            turns=self._turns,
            follow=lambda target: same_server(target, self._options.endpoint),
        )

    def _described(self, answer: Answer, repository: Repository, revision: str, subject: str) -> Described:
        """What the headers of a file's answer say: of the file itself, or of the redirect to it."""
        if answer.status >= 400:
            raise self._refusal(answer, repository, subject)
        headers = answer.headers
        is_elsewhere = answer.status >= 300
        version = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").strip().removeprefix("W/").strip('"')
        size = number(headers.get("X-Linked-Size"))
        if size is None and not is_elsewhere:
            told = content_range(headers)
            size = told.total if answer.status == 206 and told is not None else content_length(headers)
        commit = headers.get("X-Repo-Commit") or (revision if _COMMIT.fullmatch(revision) else "")
        location = headers.get("Location", "") if is_elsewhere else None
        if not version or size is None or not _COMMIT.fullmatch(commit) or location == "":
            raise _nonsense(answer)
        return Described(commit, version, size, None if location is None else redirected(answer.url, location))

    def _json(self, answer: Answer, repository: Repository, subject: str) -> Any:
        if answer.status != 200:
            raise self._refusal(answer, repository, subject)
        body = answer.read(_MOST_JSON_BYTES)
        try:
            return json.loads(body)
        except ValueError as error:
            raise _nonsense(answer) from error

    def _refusal(self, answer: Answer, repository: Repository, subject: str) -> MillraceError:
        """The error for a refusal; the hub says why in headers of its own."""
        name, code = shown(subject), answer.headers.get("X-Error-Code", "")
        site = f"{self._options.endpoint}/{repository.web_path}"
        if code == "GatedRepo":
            return DeniedError(
                f"access to {name} was denied: the repository is gated",
                next_step=f"accept its conditions at {site}, and give a token of that account (HF_TOKEN)",
            )
        if answer.status == 401:
            return DeniedError(
                f"access to {name} was denied: it is private or does not exist, or the token is not valid",
                next_step="check the name; set HF_TOKEN or `hf auth login`",
            )
        if answer.status == 404:
            missing = {
                "EntryNotFound": "no such file in this revision",
                "RevisionNotFound": "no such branch, tag or commit",
                "RepoNotFound": "no such repository, or this account may not see it",
            }.get(code, "not found")
            return ObjectNotFoundError(f"{name} does not exist ({missing})", next_step=f"look at {site}")
        return refusal(answer.status, answer.headers, subject, time.time())


def _entry(told: Mapping[str, Any]) -> Entry:
    """One entry of a tree. Its version is the id that the file's own headers have: the large file's, or else the blob's."""
    path, size = told["path"], told.get("size") or 0
    if told["type"] == "directory":
        return Entry(path, 0, None)
    version = (told.get("lfs") or {}).get("oid") or told["oid"]
    if not (isinstance(path, str) and isinstance(size, int) and isinstance(version, str)):
        raise ValueError("an entry that is none")
    return Entry(path, size, version)


def _nonsense(answer: Answer) -> OriginUnavailableError:
    error = OriginUnavailableError(
        f"{shown(answer.url)} answers as no Hugging Face hub does",
        next_step="check the endpoint, and proxies before it",
    )
    error.is_final = True
    return error


def _seconds(date: object) -> float:
    try:
        return datetime.fromisoformat(str(date)).timestamp()
    except ValueError:
        return 0.0
