"""An origin within limits: the same Protocol around any other origin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Buffer

from millrace.origin.limits.node_turns import NodeTurns
from millrace.origin.limits.wanted import Limits
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo, ObjectWriter, Origin
from millrace.origin.turns import TakesTurns, resumed
from millrace.origin.upload import ObjectUpload

if TYPE_CHECKING:
    from millrace.origin.limits.budget import Budget

Result = TypeVar("Result")


def limited(origin: Origin, limits: Limits) -> Origin:
    """`origin` within `limits`; itself where it sends no requests over a network. Raises `ConfigurationError`."""
    return origin if origin.head_is_local else LimitedOrigin(origin, limits)


class LimitedOrigin:
    """`inner`, asked within the budget that this node has for it, and again where that can help.

    One that `TakesTurns` takes one for each of its requests; of others each question counts as one. Thread-safe, safe across
    fork; pickles as `inner` and what was said about the limits. Streams of `open_writer` that need several parts are not
    limited and not tried again here: the library that sends them tries each part again.
    """

    def __init__(self, inner: Origin, limits: Limits) -> None:
        self.inner = inner
        self._limits = limits
        self._turns = NodeTurns(inner, limits)
        self._takes_turns = isinstance(inner, TakesTurns)
        self._asked: Origin = inner.within(self._turns) if isinstance(inner, TakesTurns) else inner

    def __repr__(self) -> str:
        return f"LimitedOrigin({self.inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner, self._limits)

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def head_is_local(self) -> bool:
        return self.inner.head_is_local

    def is_immutable(self, key: str) -> bool:
        return self.inner.is_immutable(key)

    # --- requests ---------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        return self._tried(key, lambda: self._asked.head(key))

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        return self._tried(key, lambda: self._asked.read(key, start, stop, version=version))

    def list_level(self, prefix: str) -> Listing:
        if self._takes_turns:
            return self._asked.list_level(prefix)
        return self._tried(prefix, lambda: self._asked.list_level(prefix))

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        for page in self.list_pages(prefix):
            if page.objects:
                yield page.objects

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        if self._takes_turns:
            return self._asked.list_pages(prefix, after=after, settled=settled)
        return resumed(
            lambda behind: self._asked.list_pages(prefix, after=behind, settled=settled),
            after,
            lambda next_page: self._tried(prefix, next_page),
        )

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._tried(key, lambda: self._asked.put(key, data, if_absent=if_absent), once=if_absent)

    def open_writer(self, key: str) -> ObjectWriter:
        writer = self._asked.open_writer(key)
        if isinstance(writer, ObjectUpload):
            writer.send_whole_by(lambda data: self.put(key, data))
        return writer

    def delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        if self._takes_turns:
            self._asked.delete(keys)
        else:
            self._tried(keys[0], lambda: self._asked.delete(keys))

    def _tried(self, key: str, question: Callable[[], Result], *, once: bool = False) -> Result:
        url = f"{self._limits.scheme}://{key}"
        if self._takes_turns:
            return self._turns.retrying(url, question, once=once)
        return self._turns.retrying(url, lambda: self._turns.turn(url, question), once=once)

    def budget_of(self, key: str) -> Budget:
        """The budget that requests for `key` count in: one for all keys, on the web one for each server."""
        return self._turns.budget_of(f"{self._limits.scheme}://{key}")
