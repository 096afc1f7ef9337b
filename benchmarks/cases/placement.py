"""How evenly placement spreads stripes, what a join or a leave moves, what a look-up takes: the real code, no network."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Case, Measure, Options, Prepared

if TYPE_CHECKING:
    from millrace.cluster.membership import Member

_JOINS = 50


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    yield Prepared(
        {
            "members": [10, 50] if options.quick else [10, 100, 1000],
            "a node": [64, 1500],
            "keys": 2000 if options.quick else 10_000,
        },
        notes=(
            "Load is that of the member with the most stripes for its weight, to the mean. Moves are stripes that get "
            f"another owner, to the share of who comes or goes: the mean of {_JOINS}.",
            "A look-up's time is CPU time; 'again' is that of the same stripe a second time.",
        ),
    )


case = Case(name="placement", title="Placement over members", prepare=prepare, rounds=1)


def _keys(count: int, seed: int) -> list[bytes]:
    import random

    source = random.Random(seed)
    return [source.randbytes(16) for _ in range(count)]


def _members(count: int, weight: Callable[[int], float]) -> list[Member]:
    from millrace.cluster.membership import Member

    return [Member(id=f"node-{number}", address="127.0.0.1:1", weight=weight(number)) for number in range(count)]


def _owners(members: Sequence[Member], keys: Sequence[bytes]) -> list[str]:
    from millrace.cluster.membership import View
    from millrace.cluster.placement import Placement

    order = Placement(View.of(members)).order
    return [order(key)[0].id for key in keys]


def _load(members: Sequence[Member], a_node: int) -> float:
    """The most stripes that a member has for its weight, to the mean."""
    count = a_node * len(members)
    loads = Counter(_owners(members, _keys(count, a_node)))
    total = sum(member.weight for member in members)
    return max(loads[member.id] / (count * member.weight / total) for member in members)


def _moves(members: Sequence[Member], newcomers: Sequence[Member], keys: Sequence[bytes]) -> tuple[float, float]:
    """What joins and leaves move, to the ideal: the newcomer's, or the leaver's, share by weight."""
    before = _owners(members, keys)
    total = sum(member.weight for member in members)
    joins, leaves = 0.0, 0.0
    for newcomer in newcomers:
        after = _owners([*members, newcomer], keys)
        moved = sum(old != new for old, new in zip(before, after, strict=True)) / len(keys)
        joins += moved / (newcomer.weight / (total + newcomer.weight))
    for number in range(len(newcomers)):
        leaver = members[number % len(members)]
        after = _owners([member for member in members if member is not leaver], keys)
        moved = sum(old != new for old, new in zip(before, after, strict=True)) / len(keys)
        leaves += moved / (leaver.weight / total)
    return joins / len(newcomers), leaves / len(newcomers)


def _microseconds(members: Sequence[Member], keys: Sequence[bytes]) -> tuple[float, float]:
    """A look-up that was not made before, and one that was."""
    from millrace.cluster.membership import View
    from millrace.cluster.placement import Placement

    order = Placement(View.of(members)).order
    few = keys[:2000]
    taken = []
    for _ in range(2):
        begun = time.process_time()
        for key in few:
            order(key)
        taken.append((time.process_time() - begun) / len(few) * 1e6)
    return taken[0], taken[1]


def _contend(name: str, weight: Callable[[int], float]) -> None:
    def run(measure: Measure, context: Mapping[str, Any]) -> list[int]:
        keys = _keys(context["keys"], 1)
        for count in context["members"]:
            members = _members(count, weight)
            with measure(f"{count} members") as figures:
                for a_node in context["a node"]:
                    figures[f"load, {a_node} a node"] = _load(members, a_node)
                newcomers = _members(count + _JOINS, weight)[count:]
                figures["joins move"], figures["leaves move"] = _moves(members, newcomers, keys)
                figures["us a look-up"], figures["us again"] = _microseconds(members, keys)
        return list(context["members"])

    case.contender(name)(run)


_contend("equal weights", lambda number: 1.0)
_contend("weights of 1 to 4", lambda number: 1.0 + number % 4)
