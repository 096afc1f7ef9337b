"""The turns of one origin on this node: which budget a request counts in, and retries around it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from millrace.config import resolve_limits
from millrace.origin.importing import imported
from millrace.origin.limits.wanted import WEB, Limits
from millrace.origin.protocol import Origin

if TYPE_CHECKING:
    from millrace.origin.limits.budget import Budget

Result = TypeVar("Result")

# Servers of the web whose budgets one origin keeps open, besides those in use.
_MOST_BUDGETS = 64

# Inside a cache directory, beside the folders of its nodes: the limits are those of all of them together.
_FOLDER = ("millrace", "limits")

_SERVER = re.compile(r"[^/?#]*")


class NodeTurns:
    """`origin.turns.Turns` out of the budgets that this node has for `origin`, which is asked for nothing but its name, and
    for the header `Retry-After` where its library hides that.

    On the web each server has a budget, also one that an answer redirects to. Thread-safe, safe across fork.
    """

    def __init__(self, origin: Origin, limits: Limits) -> None:
        self._origin = origin
        self._scheme = limits.scheme
        found = resolve_limits(limits.arguments)
        self._directory = found.directory.joinpath(*_FOLDER) if found.directory is not None else None
        self._most = found.max_requests or limits.default_max_requests
        self._per_second = found.requests_per_second
        self._budgets: dict[str, Budget] = {}

    # What carries out is imported here: a process that finds everything in the cache never comes here.

    def retrying(self, url: str, question: Callable[[], Result], *, once: bool = False) -> Result:
        plain, mark, _ = url.partition("?") if self._scheme in WEB else (url, "", "")
        what = f"{plain}?..." if mark else plain  # what follows may be a signature
        result: Result = imported("millrace.origin.limits.retrying").retried(what, question, once=once)
        return result

    def turn(self, url: str, request: Callable[[], Result]) -> Result:
        in_turn = imported("millrace.origin.limits.retrying").in_turn
        result: Result = in_turn(self.budget_of(url), url, request, lambda: self._retry_after(url))
        return result

    def keep(self) -> Callable[[], None]:
        end: Callable[[], None] = imported("millrace.origin.limits.retrying").keep()
        return end

    def budget_of(self, url: str) -> Budget:
        """The budget that a request for `url` counts in."""
        name = self._name(url)
        budget = self._budgets.get(name)
        if budget is not None and name:
            self._budgets[name] = self._budgets.pop(name, budget)  # the last used is the last
        if budget is None:
            identity = name or self._origin.identity
            file = hashlib.blake2b(identity.encode(errors="surrogateescape"), digest_size=16).hexdigest()
            path = self._directory / file if self._directory is not None else None
            shared = imported("millrace.origin.limits.budget").shared_budget
            made: Budget = shared(identity, path, most=self._most, per_second=self._per_second)
            budget = self._budgets.setdefault(name, made)
            self._let_idle_ones_go()
        return budget

    def _name(self, url: str) -> str:
        """Which of the budgets: one for all keys, on the web one for each server, by what names it there."""
        if self._scheme not in WEB:
            return ""
        scheme, _, rest = url.partition("://")
        server = _SERVER.match(rest)
        assert server is not None  # it matches anything
        return f"{scheme} {server[0]}"

    def _let_idle_ones_go(self) -> None:
        """A budget in use has two open files, and the web has many servers. What it knows stays in its file."""
        for name in list(self._budgets)[:-_MOST_BUDGETS]:
            budget = self._budgets.get(name)
            if budget is not None and budget.is_idle:
                self._budgets.pop(name, None)

    def _retry_after(self, url: str) -> float | None:
        asking = imported("millrace.origin.limits.asking")  # HTTP and TLS, for what hardly ever happens
        seconds: float | None = asking.ask_retry_after(self._origin, url.partition("://")[2])
        return seconds
