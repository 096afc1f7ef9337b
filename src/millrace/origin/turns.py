"""What an origin takes before each of its requests: a turn of the node's budget, and the patience to try again.

A question to an origin may cost several requests: a listing of a web server is a page and a HEAD for each of its links. So
that each of them counts, and what failed is tried again alone, an origin that knows its requests takes turns for them
itself (`TakesTurns`). For one that does not, `limits.LimitedOrigin` takes one turn for each question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from millrace.origin.protocol import ListingPage

Result = TypeVar("Result")


class Turns(Protocol):
    """Gives out turns. Thread-safe; safe across fork. `url` is `scheme://key`: whose budget it is, and what errors name."""

    def retrying(self, url: str, question: Callable[[], Result], *, once: bool = False) -> Result:
        """What `question` gives, called again where that can help; its requests take turns, it has none itself.

        Raises what it raises. With `once` it must make a new object, see `limits.retrying`.
        """
        ...

    def turn(self, url: str, request: Callable[[], Result]) -> Result:
        """What `request` gives or raises: one request, begun when the budget allows, and not tried again here.

        `request` asks for no other turn: with a budget of one request at once it would wait for itself.
        """
        ...

    def keep(self) -> Callable[[], None]:
        """Inside of `turn`: the turn does not end with `request`, but when what this gives is called, from any thread."""
        ...


class _Free:
    """No budget: everything at once, and once."""

    def retrying(self, url: str, question: Callable[[], Result], *, once: bool = False) -> Result:
        return question()

    def turn(self, url: str, request: Callable[[], Result]) -> Result:
        return request()

    def keep(self) -> Callable[[], None]:
        return lambda: None


FREE: Turns = _Free()


class TakesTurns:
    """An origin that takes a turn for each of its requests, and for nothing else.

    Each part of a listing or of a removal is tried again by itself; `head`, `read` and `put` by whoever calls them.
    """

    _turns: Turns = FREE

    def within(self, turns: Turns) -> Self:
        """The same origin, with what it has open, whose requests take these turns."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _turns=turns)
        return twin


def resumed(
    begin: Callable[[str], Iterator[ListingPage]],
    after: str,
    carry_out: Callable[[Callable[[], ListingPage | None]], ListingPage | None],
) -> Iterator[ListingPage]:
    """The pages that follow `after`; where one fails, `carry_out` may call again for it, and the listing goes on there.

    `begin(after)` begins a listing behind a key.
    """
    pages: Iterator[ListingPage] | None = None
    position, is_directory = after, False

    def next_page() -> ListingPage | None:
        nonlocal pages
        if pages is None:
            pages = begin(position)
        try:
            return next(pages, None)
        except BaseException:
            pages = None  # a generator that has raised is over: the next try begins behind what was told
            raise

    while (page := carry_out(next_page)) is not None:
        # Told by the page that shows it, and by all that follow, also when the listing had to begin again behind it.
        is_directory = is_directory or page.is_directory
        if page.objects:
            position = page.objects[-1].key
        yield page if page.is_directory == is_directory else replace(page, is_directory=is_directory)
        if page.last:
            return
