"""A cold start of 64 worker processes on one node, before a store that refuses what is above its capacity.

A real S3 server behind the emulated region, which answers 503 SlowDown to what comes while more than 32 requests are in
flight, as S3 does above what a prefix bears. Each worker reads objects that no other one reads, with 8 threads, so no cache
helps: what differs is who holds back, and how. Counted at the server's door, refusals included.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.buckets import BUCKET, fill, obstore_client, through
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_WORKERS, _THREADS = 64, 8
_CAPACITY = 32
_NBYTES = 64 << 10

Read = Callable[[str], bytes]


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    each = 4 if options.quick else 16
    with S3Server(options.scratch / "s3") as s3:
        fill(s3, ((_name(number), _content(number)) for number in range(_WORKERS * each)))
        with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.1, bytes_per_second=None) as region:
            region.fail("status", status=503, code="SlowDown", count=None, above_in_flight=_CAPACITY)
            yield Prepared(
                {"options": through(region, s3), "each": each},
                probe=_probe_of(region),
                expected=0,
                notes=(
                    f"{_WORKERS} processes with {_THREADS} threads each read {each} objects of {_NBYTES >> 10} KiB; "
                    f"a round trip of {region.round_trip_seconds * 1e3:.0f} ms; 503 above {_CAPACITY} requests in flight.",
                ),
            )


def _name(number: int) -> str:
    return f"cold/{number:05}"


def _content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (_NBYTES // 4)


def _probe_of(region: EmulatedRegion) -> Callable[[], Mapping[str, float]]:
    """Counters that only grow; the growth of the sum of peaks during a phase is the peak in it."""
    sums = {"requests": 0.0, "refused": 0.0, "most in flight": 0.0}

    def probe() -> Mapping[str, float]:
        stats = region.stats()
        region.reset()
        sums["requests"] += stats.requests
        sums["most in flight"] += stats.most_in_flight
        sums["refused"] = float(sum(region.fault_hits()))
        return dict(sums)

    return probe


case = Case(
    name="stampede", title="Sixty-four workers start cold", prepare=prepare, baseline="obstore, its own retries",
    rounds=3, timeout_seconds=300.0,
)  # fmt: skip


def _all_workers(measure: Measure, context: Mapping[str, Any], reader: Callable[[], Read]) -> int:
    """How many objects were read wrong. All workers begin at the same moment; a read that fails is a figure."""
    import obstore.store  # noqa: F401 - so that the workers have it

    import millrace.origin.limits.retrying
    import millrace.origin.object_store  # noqa: F401

    start, go = os.pipe()
    results, result = os.pipe()
    children = []
    for worker in range(_WORKERS):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        try:
            os.close(go)
            os.read(start, 1)  # until the parent closes its end
            os.write(result, (json.dumps(_work(worker, context["each"], reader())) + "\n").encode())
        finally:
            os._exit(0)
    os.close(result)
    with measure("cold start") as figures, os.fdopen(results) as lines:
        os.close(go)
        reports = [json.loads(line) for line in lines]
        figures["failed"] = float(sum(failed for _, failed in reports))
    for pid in children:
        os.waitpid(pid, 0)
    missing: int = context["each"] * (_WORKERS - len(reports))
    return missing + sum(int(wrong) for wrong, _ in reports)


def _work(worker: int, each: int, read: Read) -> tuple[int, int]:
    """How many of the worker's reads were wrong, and how many failed."""
    from obstore.exceptions import BaseError

    from millrace.errors import MillraceError

    def one(number: int) -> str:
        try:
            return "right" if read(_name(number)) == _content(number) else "wrong"
        except (MillraceError, BaseError):
            return "failed"

    with ThreadPoolExecutor(_THREADS) as pool:
        answers = list(pool.map(one, range(worker * each, (worker + 1) * each)))
    return answers.count("wrong"), answers.count("failed")


@case.contender("obstore, its own retries")
def obstore_alone(measure: Measure, context: Mapping[str, Any]) -> int:
    def reader() -> Read:
        client = obstore_client(context["options"])
        return lambda name: bytes(client.get_range(name, start=0, end=_NBYTES))

    return _all_workers(measure, context, reader)


def _millrace(measure: Measure, context: Mapping[str, Any], max_requests: int) -> int:
    def reader() -> Read:
        from millrace.origin import open_origin

        limits = {"cache_dir": context["scratch"], "max_requests": max_requests}
        origin = open_origin("s3", context["options"], limits)
        return lambda name: bytes(origin.read(f"{BUCKET}/{name}", 0, _NBYTES))

    return _all_workers(measure, context, reader)


@case.contender("Millrace, gate only")
def gate_only(measure: Measure, context: Mapping[str, Any]) -> int:
    return _millrace(measure, context, 1024)


@case.contender("Millrace, default of 128")
def default(measure: Measure, context: Mapping[str, Any]) -> int:
    return _millrace(measure, context, 128)


@case.contender("Millrace, max_requests=32")
def fitting(measure: Measure, context: Mapping[str, Any]) -> int:
    return _millrace(measure, context, _CAPACITY)
