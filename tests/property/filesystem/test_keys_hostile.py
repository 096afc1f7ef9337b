"""Hostile names: any key is read as itself or refused, and never read as another.

Over local files with a cache, and over an origin that accepts every name, with every cache of a node between them.
The same over a real S3 server and through the commands: tests/integration/security/test_keys.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.support.origins import MemoryOrigin

import millrace
from millrace.cache.node import CacheNode
from millrace.config import resolve
from millrace.errors import MillraceError
from millrace.origin import ObjectInfo
from millrace.store.records import object_id

PARTS = [
    *(
        "..",
        ".",
        "",
        "...",
        " ",
        "a",
        "b",
        "A",
        "é",
        "e\u0301",
        "ﬀ",
        "ff",
        "\u202e",
        "\x00",
        "\n",
        "\r",
        "\x1b",
        "\x7f",
    ),
    *(
        "\x85",
        "\ud800",
        "\\",
        "%2e%2e",
        "%2f",
        "%00",
        "a\\b",
        "..\\a",
        "~",
        "~root",
        "$HOME",
        "*",
        "?",
        "[a]",
        "#",
        ":",
    ),
    *("@", "FORMAT", "index", "index.mdb", "locks", "setup.lock", "objects", "segments", "rules.json", "node.json"),
    *("k" * 255, "k" * 256, "k" * 1024, "é" * 128, "CON", "-rf", "a;b", "a|b", "`a`", "\U0001f600"),
]
keys = st.one_of(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("/".join),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("".join),
    st.text(st.characters(codec=None), max_size=40),
)
quickly = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


# --- names of cache entries ---------------------------------------------------------------------------

described = st.tuples(keys, keys, keys, st.integers(0, 10**12))


@given(described, described)
def test_two_objects_have_different_ids_in_the_cache(
    one: tuple[str, str, str, int], other: tuple[str, str, str, int]
) -> None:
    """Also where a part of one ends in what the next part of the other begins with."""
    assert (object_id(*one) == object_id(*other)) == (one == other)
    moved = (one[0] + one[1][:1], one[1][1:], one[2], one[3])
    assert (object_id(*moved) == object_id(*one)) == (moved == one)


# --- everything between an origin and a reader --------------------------------------------------------


@pytest.fixture(scope="module")
def cache() -> Iterator[tuple[CacheNode, MemoryOrigin, Path]]:
    directory = Path(tempfile.mkdtemp())
    node = CacheNode(
        resolve({"cache_dir": str(directory / "c"), "min_free": 0, "members": "none"}, environ={}, file={})
    )
    yield node, MemoryOrigin(), directory
    node.close()
    shutil.rmtree(directory)


@quickly
@given(st.lists(keys, min_size=2, max_size=6, unique=True))
def test_each_name_has_its_own_bytes_in_the_cache(
    cache: tuple[CacheNode, MemoryOrigin, Path], names: list[str]
) -> None:
    node, origin, directory = cache
    contents = {name: os.urandom(100) for name in names}
    for name, data in contents.items():
        origin.put(name, data)
    for _ in range(2):  # from the origin, and then from the disk
        for name, data in contents.items():
            info: ObjectInfo = origin.head(name)
            reader = node.open_reader(origin, info)
            assert bytes(reader.read(0, info.size)) == data
            reader.close()
            known = node.metadata.stat(origin, name)
            assert known.key == name
    assert [path.name for path in directory.iterdir()] == ["c"]
    assert [path.name for path in (directory / "c").iterdir()] == ["millrace"]


# --- local files --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp())
    yield directory
    shutil.rmtree(directory)


@pytest.mark.slow
@quickly
@given(st.lists(keys, min_size=1, max_size=4, unique=True))
def test_any_path_names_its_file_or_is_refused(place: Path, names: list[str]) -> None:
    """A local path has its usual meaning, `..` included; no other file is touched."""
    base = Path(tempfile.mkdtemp(dir=place))
    inside = base / "inside"
    inside.mkdir()
    fs = millrace.filesystem("file", cache_dir=str(base / "cache"), min_free=0, members="none", consistency="always")
    for number, name in enumerate(names):
        path = f"{inside}/{name}"
        meant = os.path.abspath(path)
        assume(Path(meant).is_relative_to(base) and not Path(meant).is_relative_to(base / "cache"))
        assume("~" not in name and "://" not in path)  # a home directory, or another scheme
        before = tree(base)
        data = f"the content of {number}".encode()
        if refused(fs, path, data):
            assert tree(base) == before
            with pytest.raises(MillraceError):
                fs.cat_file(path)
            continue
        after = tree(base)
        assert {found for found in after if after[found] != before.get(found)} == {os.fsencode(meant)}
        assert Path(meant).read_bytes() == data
        for _ in range(2):
            assert fs.cat_file(path) == fs.cat_file(meant) == data
        assert fs.info(path)["name"] == meant


def refused(fs: millrace.MillraceFileSystem, path: str, data: bytes) -> bool:
    """Write a file; returns whether Millrace refused it."""
    try:
        fs.pipe_file(path, data)
    except MillraceError:
        return True
    return False


def tree(base: Path) -> dict[bytes, bytes]:
    """The files below a folder, but for the cache, with what they hold."""
    found = {}
    for folder, _, files in os.walk(os.fsencode(base)):
        for name in files:
            path = os.path.join(folder, name)
            if not path.startswith(os.fsencode(base / "cache")):
                with open(path, "rb") as file:
                    found[path] = file.read()
    return found
