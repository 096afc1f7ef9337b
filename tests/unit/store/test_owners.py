import random
from collections import Counter

import pytest

from millrace.store.records import owners

_RANDOM = random.Random(7)
KEYS = [_RANDOM.randbytes(16) for _ in range(20_000)]


def placed(nodes: dict[str, float]) -> list[str]:
    return [owners(key, nodes.items())[0] for key in KEYS]


@pytest.mark.parametrize(
    ("key", "nodes", "expected"),
    [
        (b"", {}, []),
        (b"x", {"only": 0.001}, ["only"]),
        # Fixed: another order would empty every cache.
        (b"object", {"a": 1, "b": 1, "c": 1}, ["b", "a", "c"]),
        (b"another", {"a": 1, "b": 1, "c": 1}, ["c", "b", "a"]),
        (b"object", {"a": 1000, "b": 1, "c": 1}, ["a", "b", "c"]),
    ],
)
def test_owners_are_stable_and_distinct(key: bytes, nodes: dict[str, float], expected: list[str]) -> None:
    assert owners(key, nodes.items()) == expected
    assert owners(key, list(nodes.items())[::-1]) == expected


@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1, 1], [1, 2, 4], [5e11, 1e12], [1, 0.1]])
def test_owners_are_shared_by_weight(weights: list[float]) -> None:
    nodes = {f"/disk{number}": weight for number, weight in enumerate(weights)}
    counts = Counter(placed(nodes))
    for node, weight in nodes.items():
        assert counts[node] / len(KEYS) == pytest.approx(weight / sum(weights), abs=0.015)


def test_owners_after_join_or_leave_move_one_share() -> None:
    nodes = {"a": 1.0, "b": 2.0, "c": 3.0}
    before, after = placed(nodes), placed({**nodes, "d": 2.0})
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {"d"}
    assert len(moved) / len(KEYS) == pytest.approx(2 / 8, abs=0.015)
    # and the new owner is the second in the order
    for key in KEYS[:500]:
        order = owners(key, nodes.items())
        rest = {node: weight for node, weight in nodes.items() if node != order[0]}
        assert owners(key, rest.items()) == order[1:]


def test_owners_after_weight_grows_only_gain() -> None:
    before, after = placed({"a": 1.0, "b": 1.0, "c": 1.0}), placed({"a": 1.0, "b": 1.0, "c": 1.5})
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"c"}
