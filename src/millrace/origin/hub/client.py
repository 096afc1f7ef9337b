"""The hub's HTTP interface: commits of revisions, descriptions of files, directories, and ranges of bytes.

These are the requests of huggingface_hub (2.4), sent over our own connections: its client retries refused requests by
itself, which would multiply with the retries of the node and bypass its limits.
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
from millrace.errors import DeniedError, MillraceError, ObjectNotFoundError, OriginUnavailableError, UsageError
from millrace.origin.base import UNLIMITED, RequestLimiter
from millrace.origin.hub.names import Repository, file_url, revision_url, tree_url
from millrace.origin.hub.options import HubOptions, find_token
from millrace.origin.web.addresses import redirected, same_server, shown
from millrace.origin.web.connections import Connections, Response
from millrace.origin.web.responses import (
    announced_range,
    check_encoding,
    content_length,
    content_range,
    exact_body,
    number,
    refusal,
)

Result = TypeVar("Result")

_MOST_JSON_BYTES = 64 << 20
_MOST_UNASKED_BYTES = 64 << 20
_NEXT_PAGE = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_COMMIT = re.compile(r"[0-9a-f]{40}")
_GONE_ROUTE = frozenset({400, 401, 403, 404, 410})


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit and its date in Unix seconds."""

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
    """A file of a commit; `route` is the URL of its bytes if another server has them."""

    commit: str
    version: str
    size: int
    route: str | None


class RouteGoneError(Exception):
    """A URL from the hub has expired: request another one. Never leaves the origin."""


class HubClient:
    """Sends the requests of one origin. Thread-safe; for one process.

    `subject` is the URL of the user, which errors name. Each request takes a slot of `limiter`.
    """

    def __init__(self, options: HubOptions, limiter: RequestLimiter = UNLIMITED) -> None:
        self._options = options
        self._limiter = limiter
        self._connections = Connections()

    # --- descriptions and listings ----------------------------------------------------------------

    def commit(self, repository: Repository, revision: str, subject: str) -> Commit:
        """The present commit of `revision`. Raises `ObjectNotFoundError`, `DeniedError`."""

        def commit_of(response: Response) -> Commit:
            data = self._json(response, repository, subject)
            commit = data.get("sha") if isinstance(data, dict) else None
            if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
                raise _nonsense(response)
            return Commit(commit, _seconds(data.get("lastModified")))

        return self._request("GET", revision_url(self._options.endpoint, repository, revision), commit_of)

    def describe(self, repository: Repository, revision: str, path: str, subject: str) -> Described:
        """The description of a file and its commit, with one request. Raises `ObjectNotFoundError`, `DeniedError`."""
        return self._request(
            "HEAD",
            file_url(self._options.endpoint, repository, revision, path),
            lambda response: self._described(response, repository, revision, subject),
        )

    def tree(
        self, repository: Repository, commit: str, path: str, subject: str, *, recursive: bool
    ) -> Iterator[Sequence[Entry]]:
        """The directory `path` of a commit, in pages, in no particular order; one request for each consumed page.

        Each page is retried by itself. Raises `ObjectNotFoundError` for a missing directory.
        """

        def page_of(response: Response) -> tuple[list[Entry], str | None]:
            data = self._json(response, repository, subject)
            following = _NEXT_PAGE.search(response.headers.get("Link", ""))
            try:
                page = [_entry(each) for each in data if each["type"] in ("file", "directory")]
                url = urljoin(response.url, following[1]) if following else None
                # A proxy that ignores the query of a page would send the first one without end.
                is_next = url is None or (url not in requested and same_server(url, self._options.endpoint))
            except (KeyError, TypeError, ValueError) as error:
                raise _nonsense(response) from error
            if not is_next:
                raise _nonsense(response)
            return page, url

        requested: set[str] = set()
        url: str | None = tree_url(self._options.endpoint, repository, commit, path, recursive=recursive)
        while url is not None:
            requested.add(url)
            request = functools.partial(self._request, "GET", url, page_of)
            page, url = self._limiter.retrying(subject, request)
            yield page

    # --- bytes ------------------------------------------------------------------------------------

    def read(
        self, repository: Repository, commit: str, path: str, subject: str, start: int, stop: int, version: str | None
    ) -> tuple[Described, Buffer | None]:
        """The description of a file of a commit, and its range if the hub itself has the bytes.

        None instead of bytes if another server has them (`route`), or if the file has another version. Raises `UsageError`
        for a range that ends past the end.
        """
        url = file_url(self._options.endpoint, repository, commit, path)

        def is_elsewhere(described: Described) -> bool:
            if version is not None and described.version != version:
                return True
            if stop > described.size:
                raise UsageError(
                    f"the range [{start}, {stop}) ends past the {described.size} bytes of {shown(subject)}",
                    next_step="read inside the object",
                )
            return described.route is not None

        def use(response: Response) -> tuple[Described, Buffer | None] | None:
            if response.status == 416:
                return None
            described = self._described(response, repository, commit, subject)
            if is_elsewhere(described):
                return described, None
            return described, self._range(response, url, start, stop, described.size)

        got = self._request("GET", url, use, {"Range": f"bytes={start}-{stop - 1}"})
        if got is None:
            described = self.describe(repository, commit, path, subject)
            if not is_elsewhere(described):
                raise OriginUnavailableError(f"{shown(url)} refuses a range inside the file", next_step="read again")
            got = described, None
        return got

    def read_route(self, url: str, start: int, stop: int, size: int) -> Buffer:
        """The range from the server to which the hub redirects. Raises `RouteGoneError`."""

        def use(response: Response) -> Buffer | None:
            if response.status in _GONE_ROUTE:
                return None
            if response.status not in (200, 206):
                raise refusal(response.status, response.headers, response.url, time.time())
            return self._range(response, response.url, start, stop, size)

        headers = {"Range": f"bytes={start}-{stop - 1}"}
        data = self._connections.request("GET", url, lambda _: headers, use, limiter=self._limiter)
        if data is None:
            raise RouteGoneError
        return data

    def _range(self, response: Response, url: str, start: int, stop: int, size: int) -> Buffer:
        check_encoding(response.headers, url)
        if response.status == 206:
            _, total = announced_range(response, url, start, stop)
            if total != size:
                raise OriginUnavailableError(
                    f"{shown(url)} has {total} bytes instead of {size}", next_step="read again"
                )
            return exact_body(response, url, start, stop)
        if response.status != 200 or size > _MOST_UNASKED_BYTES:
            raise OriginUnavailableError(f"{shown(url)} cannot be read by ranges", next_step="ask the hub's operator")
        return memoryview(exact_body(response, url, 0, size))[start:stop]

    # --- requests and responses -------------------------------------------------------------------

    def _request(
        self, method: str, url: str, use: Callable[[Response], Result], extra: Mapping[str, str] | None = None
    ) -> Result:
        """Send a request to the hub and return the result of `use`.

        Redirects within the hub are followed. A redirect to another server is the response.
        """
        token = find_token(self._options.token, os.environ)

        def headers(target: str) -> Mapping[str, str]:
            mine = {"User-Agent": f"millrace/{_version.__version__}", **(extra or {})}
            if token is not None and same_server(target, self._options.endpoint):
                mine["Authorization"] = f"Bearer {token}"
            return mine

        return self._connections.request(
            method,
            url,
            headers,
            use,
            limiter=self._limiter,
            follow=lambda target: same_server(target, self._options.endpoint),
        )

    def _described(self, response: Response, repository: Repository, revision: str, subject: str) -> Described:
        """The description of a file from the headers of a response with the file, or with a redirect to it."""
        if response.status >= 400:
            raise self._refusal(response, repository, subject)
        headers = response.headers
        is_elsewhere = response.status >= 300
        version = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").strip().removeprefix("W/").strip('"')
        size = number(headers.get("X-Linked-Size"))
        if size is None and not is_elsewhere:
            found = content_range(headers)
            size = found.total if response.status == 206 and found is not None else content_length(response)
        commit = headers.get("X-Repo-Commit") or (revision if _COMMIT.fullmatch(revision) else "")
        location = headers.get("Location", "") if is_elsewhere else None
        if not version or size is None or not _COMMIT.fullmatch(commit) or location == "":
            raise _nonsense(response)
        return Described(commit, version, size, None if location is None else redirected(response.url, location))

    def _json(self, response: Response, repository: Repository, subject: str) -> Any:
        if response.status != 200:
            raise self._refusal(response, repository, subject)
        body = response.read(_MOST_JSON_BYTES)
        try:
            return json.loads(body)
        except ValueError as error:
            raise _nonsense(response) from error

    def _refusal(self, response: Response, repository: Repository, subject: str) -> MillraceError:
        """The error for a refusal; the hub has special headers with the reason."""
        name, code = shown(subject), response.headers.get("X-Error-Code", "")
        site = f"{self._options.endpoint}/{repository.web_path}"
        if code == "GatedRepo":
            return DeniedError(
                f"access to {name} was denied: the repository is gated",
                next_step=f"accept its conditions at {site}, and set a token of that account (HF_TOKEN)",
            )
        if response.status == 401:
            return DeniedError(
                f"access to {name} was denied: it is private or does not exist, or the token is not valid",
                next_step="check the name; set HF_TOKEN or `hf auth login`",
            )
        if response.status == 404:
            missing = {
                "EntryNotFound": "no such file in this revision",
                "RevisionNotFound": "no such branch, tag or commit",
                "RepoNotFound": "no such repository, or this account may not see it",
            }.get(code, "not found")
            return ObjectNotFoundError(f"{name} does not exist ({missing})", next_step=f"look at {site}")
        return refusal(response.status, response.headers, subject, time.time())


def _entry(data: Mapping[str, Any]) -> Entry:
    """One entry of a tree. Its version is the id in the headers of the file: of the large file (LFS) or of the blob."""
    path, size = data["path"], data.get("size") or 0
    if data["type"] == "directory":
        return Entry(path, 0, None)
    version = (data.get("lfs") or {}).get("oid") or data["oid"]
    if not (isinstance(path, str) and isinstance(size, int) and isinstance(version, str)):
        raise ValueError("invalid entry")
    return Entry(path, size, version)


def _nonsense(response: Response) -> OriginUnavailableError:
    error = OriginUnavailableError(
        f"{shown(response.url)} does not respond as a Hugging Face hub",
        next_step="check the endpoint, and proxies before it",
    )
    error.is_final = True
    return error


def _seconds(date: object) -> float:
    try:
        return datetime.fromisoformat(str(date)).timestamp()
    except ValueError:
        return 0.0
