"""The cost of observation: warm opens of 26 kB with metrics and logs and without, and scrapes of 1,000 sets of labels.

Without: logging is disabled, no hook receives events, and the counters, histograms and the attribution do nothing. Uses are
noted in both, because eviction needs them. With: the defaults, and a log file that gets lines from INFO on. The maintenance
thread, which adds up twice a second, counts as CPU time of its process.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.cache.attribution import ROWS, Attribution
from millrace.cache.counters import Counters
from millrace.cache.eviction.usage import Tally
from millrace.store.records import ObjectName

_FILE_BYTES = 26_000
_TOKEN = "a-token-for-benchmarks-only"


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    files, passes, scrapes = (100, 2, 5) if options.quick else (2000, 100, 200)
    data = options.scratch / "data"
    data.mkdir()
    source = random.Random(0)
    for number in range(files):
        (data / f"{number:05}.jpg").write_bytes(source.randbytes(_FILE_BYTES))
    yield Prepared(
        {"data": str(data), "files": files, "passes": passes, "scrapes": scrapes},
        expected=files * passes * _FILE_BYTES,
        notes=("Goals: at most 1.05 times the CPU time of `off`; a scrape below 5 ms.",),
    )


case = Case(name="observing", title="Metrics and logs", prepare=prepare, baseline="off", rounds=7)


def _read(measure: Measure, context: Mapping[str, Any]) -> int:
    import millrace

    fs = millrace.filesystem("file", cache_dir=f"{context['scratch']}/cache", min_free=0)
    paths = sorted(fs.ls(context["data"], detail=False))
    for _ in range(3):
        for path in paths:
            fs.open_input_stream(path).read()
    total = 0
    with measure("warm opens") as figures:
        for _ in range(context["passes"]):
            for path in paths:
                total += len(fs.open_input_stream(path).read())
        figures["opens"] = context["passes"] * len(paths)
    return total


@case.contender("off")
def off(measure: Measure, context: Mapping[str, Any]) -> int:
    import millrace
    from millrace import events

    assert millrace.filesystem is not None  # registers the hooks
    logging.disable()
    events._hooks.registered.clear()
    for kind, name in ((Counters, "add"), (Counters, "observe"), (Attribution, "add")):
        setattr(kind, name, lambda *_: None)
    return _read(measure, context)


@case.contender("on")
def on(measure: Measure, context: Mapping[str, Any]) -> int:
    logging.basicConfig(filename=f"{context['scratch']}/log", level=logging.INFO)
    return _read(measure, context)


@case.contender("on, scraped")
def scraped(measure: Measure, context: Mapping[str, Any]) -> int:
    """The scrapes of a node; the reads are those of `on`."""
    total = on(measure, context)
    from millrace.config import resolve
    from millrace.node.process import NodeProcess
    from millrace.testing.process import free_ports

    (port,) = free_ports(1)
    options = resolve(
        {
            "cache_dir": str(Path(context["scratch"]) / "node"),
            "min_free": 0,
            "cluster_token": _TOKEN,
            "members": f"static://127.0.0.1:{port}",
        }
    )
    with NodeProcess(options, port=port) as node:
        (disk,) = node.node.open_disks
        names = [ObjectName("s3", f"bucket/data-set-{number}/key", "version").pack() for number in range(ROWS)]
        disk.attribution.add([Tally(b"unit", 0, 1, name, hits=1, hit_bytes=1) for name in names])
        connection = HTTPConnection(node.address, timeout=30)
        seconds = []

        def scrape() -> bytes:
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {_TOKEN}"})
            return connection.getresponse().read()

        page = scrape()
        with measure("scrapes") as figures:
            for _ in range(context["scrapes"]):
                began = time.perf_counter()
                scrape()
                seconds.append(time.perf_counter() - began)
            figures["scrapes"] = context["scrapes"]
            figures["label sets"] = page.count(b"\nmillrace_")
            figures["median ms"] = 1e3 * statistics.median(seconds)
            figures["least ms"] = 1e3 * min(seconds)
        connection.close()
    return total
