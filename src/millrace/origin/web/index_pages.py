"""The index pages that web servers make of directories: their links are the listing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

from millrace.origin.web.addresses import readable, same_server


@dataclass(frozen=True, slots=True)
class IndexPage:
    """What lies directly in a directory, as the last parts of keys, sorted and without repeats."""

    files: Sequence[str]
    directories: Sequence[str]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.targets += [value.strip() for name, value in attrs if name == "href" and value]


def parse_index(url: str, text: str) -> IndexPage:
    """The links of the page at `url` (with its slash) that lead to what is directly below it.

    Links elsewhere (the parent, other servers), with a query (the columns by which to sort) or deeper down are no entries.
    """
    links = _Links()
    links.feed(text)
    links.close()
    base = urlsplit(url).path
    files, directories = set[str](), set[str]()
    for target in links.targets:
        try:
            full = urljoin(url, target).partition("#")[0]
            parts = urlsplit(full)
            here = same_server(full, url) and parts.path.startswith(base) and not parts.query
        except ValueError:  # a link that is none, written by hand
            continue
        name, slash, deeper = parts.path[len(base) :].partition("/")
        if here and name and not deeper and name not in (".", ".."):
            (directories if slash else files).add(readable(name))
    return IndexPage(sorted(files), sorted(directories))
