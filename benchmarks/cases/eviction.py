"""What share of the bytes a policy of eviction hits, over traces: a simulation, so nothing here depends on the machine.

Only the time does: it is that of the simulation, in Python, and shows the cost of a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.support.eviction_simulation import POLICIES, Policy, simulate
from tests.support.eviction_traces import Trace, all_traces

from benchmarks.harness import Case, Measure, Options, Prepared


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    units = 50 if options.quick else 500
    yield Prepared(
        {"units": units},
        notes=(f"Byte hit ratios by simulation; the cache holds about {units} units.",),
    )


case = Case(name="eviction", title="Eviction", prepare=prepare, baseline="optimum (Belady)", rounds=1)


def _contend(name: str, policy: Callable[[Trace], Policy]) -> None:
    def run(measure: Measure, context: Mapping[str, Any]) -> list[int]:
        read = []
        for trace in all_traces(units=context["units"]):
            with measure(trace.name) as figures:
                figures["hit ratio"] = simulate(policy, trace)
            read.append(sum(trace.nbytes[unit] for unit in trace.accesses))
        return read

    case.contender(name)(run)


for _name, _policy in POLICIES.items():
    _contend(_name, _policy)
