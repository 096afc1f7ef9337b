"""The cost of the limits for a request without a wait: an origin that responds at once, alone and within its budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Case, Measure, Options, Prepared

if TYPE_CHECKING:
    from millrace.origin import Origin


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    requests = 20_000 if options.quick else 200_000
    yield Prepared({"requests": requests}, notes=(f"{requests} requests of one thread, to an origin in memory.",))


case = Case(name="limits", title="What the limits cost a request", prepare=prepare, baseline="the origin alone")


def _run(measure: Measure, context: Mapping[str, Any], origin: Origin) -> int:
    origin.put("b/k", b"content")
    origin.head("b/k")  # opens the file
    requests: int = context["requests"]
    total = 0
    with measure("requests") as figures:
        for _ in range(requests):
            total += origin.head("b/k").size
        figures["requests"] = requests
    return total


@case.contender("the origin alone")
def alone(measure: Measure, context: Mapping[str, Any]) -> int:
    from tests.support.origins import MemoryOrigin

    return _run(measure, context, MemoryOrigin())


def _limited(measure: Measure, context: Mapping[str, Any], **limits: Any) -> int:
    from tests.support.origins import MemoryOrigin

    from millrace.origin.base import Limits, limited

    arguments = {"cache_dir": context["scratch"], **limits}
    return _run(measure, context, limited(MemoryOrigin(), Limits.of("s3", arguments)))


@case.contender("within a budget")
def budget(measure: Measure, context: Mapping[str, Any]) -> int:
    return _limited(measure, context)


@case.contender("within a budget and a rate")
def rate(measure: Measure, context: Mapping[str, Any]) -> int:
    return _limited(measure, context, request_rate=1_000_000)
