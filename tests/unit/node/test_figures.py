"""The contents of a node: counted by data set, and counted again without a delay for the callers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cache.node import CacheNode, cache_node
from millrace.config import resolve
from millrace.errors import StorageError
from millrace.filesystem import MillraceFileSystem
from millrace.node import figures
from millrace.node.figures import Contents, Dataset, NodeFigures, dataset_of


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("bucket/train/clips/1.parquet", "bucket/train/clips"),
        ("bucket/train/clips/de/more/1.parquet", "bucket/train/clips"),
        ("bucket/1.parquet", "bucket"),
        ("/data/train/1.parquet", "/data/train"),
        ("host/a/b?signature=1/2/3", "host/a"),
        ("key", ""),
    ],
)
def test_dataset_of_a_key_is_a_prefix_without_a_query(key: str, expected: str) -> None:
    assert dataset_of(key) == expected


@pytest.fixture
def node(tmp_path: Path, make: Callable[..., MillraceFileSystem]) -> CacheNode:
    fs = make()
    for name in ("train/a", "train/b", "dev/a"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"12345")
        fs.cat_file(str(tmp_path / "data" / name))
    fs.pin(str(tmp_path / "data" / "train"))
    return cache_node(resolve({"cache_dir": str(tmp_path / "cache"), "min_free": 0}))


def test_contents_are_counted_by_dataset_with_the_rules(node: CacheNode, tmp_path: Path) -> None:
    found = NodeFigures(node).contents()
    # The keys are longer than two levels, so that all are one data set.
    [dataset] = found.datasets.values()
    assert dataset == Dataset(objects=3, complete_objects=3, nbytes=15)
    [rule] = found.rules
    assert (rule.prefix, rule.pinned, rule.used_bytes) == (str(tmp_path / "data" / "train"), True, 10)
    assert NodeFigures(node).now()["complete_objects"] == 3


def test_contents_while_a_later_count_is_slow_are_the_ones_before(
    node: CacheNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_FRESH_TIMES", 0.0)
    monkeypatch.setattr(figures, "_PATIENCE_SECONDS", 0.01)
    first = NodeFigures(node)
    before = first.contents()
    proceed = threading.Event()
    later = Contents({}, ())

    def slow(_: NodeFigures) -> Contents:
        assert proceed.wait(120)
        return later

    monkeypatch.setattr(NodeFigures, "_count", slow)
    assert first.contents() is before
    proceed.set()
    monkeypatch.setattr(figures, "_PATIENCE_SECONDS", 30.0)
    assert first.contents() is later


def test_count_that_fails_is_raised_and_repeated(node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    found = NodeFigures(node)

    def fail(_: NodeFigures) -> Contents:
        raise StorageError("disk", next_step="replace it")

    with monkeypatch.context() as failing:
        failing.setattr(NodeFigures, "_count", fail)
        with pytest.raises(StorageError):
            found.contents()
    assert found.contents().rules


def test_contents_after_the_thread_of_a_count_could_not_start_are_counted(
    node: CacheNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = NodeFigures(node)
    with monkeypatch.context() as at_limit:
        at_limit.setattr(threading.Thread, "start", _no_more_threads)
        with pytest.raises(RuntimeError):
            found.contents()
    counted: list[Contents] = []
    later = threading.Thread(target=lambda: counted.append(found.contents()), daemon=True)
    later.start()
    later.join(60)
    assert counted


def _no_more_threads(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
