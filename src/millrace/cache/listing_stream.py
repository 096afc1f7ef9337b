"""A listing as it comes from the origin, page by page, and what a page of it says about a directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from millrace.cache.asking import Asking
from millrace.cache.positions import END, Moment, Space
from millrace.origin import ListingPage, ObjectInfo, Origin

Below = Literal["something", "empty", "nothing"]
"""What lies below a key: something; nothing, but it is a directory all the same; or it is none."""


def base_of(prefix: str) -> str:
    """The text with which every key below a directory begins."""
    return prefix.rstrip("/") + "/"


def end_of(prefix: str) -> str:
    """A text that sorts after every key below a directory, and before whatever follows it."""
    return base_of(prefix) + END


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of a directory after the key `after` of the answer before: its objects up to `through`."""

    objects: Sequence[ObjectInfo]
    through: str
    is_directory: bool = False

    def within(self, prefix: str, after: str, space: Space) -> Answer:
        """The part of the answer to a question about a directory further up that is below `prefix`, and after `after`."""
        first, last = space.position(after), space.position(end_of(prefix))
        objects = [info for info in self.objects if first < space.position(info.key) < last]
        through = max(first, min(space.position(self.through), last))
        is_directory = after == base_of(prefix) and any(info.key == after for info in self.objects)
        return Answer(objects, space.key(through), is_directory)


class ListingStream:
    """The listing of `root` after the key `start`; each page that is taken is one request.

    `asked` is for the caller: the moment before the last page was taken. `age` is how old that page was when it came.
    """

    def __init__(
        self, asking: Asking, origin: Origin, root: str, start: str, settled: Callable[[str], ObjectInfo | None]
    ) -> None:
        self.root = root
        self.after = start
        self.asked: Moment | None = None
        self.age = 0.0
        self._pages = iter(asking.list_pages(origin, root, after=start, settled=settled))

    def next_page(self) -> ListingPage:
        """The next page; `after` is then where it ends."""
        page, self.age = next(self._pages)
        if page.last:
            self.after = end_of(self.root)
        elif page.objects:
            self.after = page.objects[-1].key
        return page
