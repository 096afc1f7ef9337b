"""Several machines that read one data set: 1, 2 and 4 nodes, each with a reader of its own, behind one region.

All share two things that real machines have each for themselves, the processors and the region's bandwidth, so what is
shown is what the cluster takes off the link, and what it costs, not what more machines add. Readers read everything, each in
an order of its own: once with nothing cached anywhere, and once more after each node has dropped what it does not own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.buckets import BUCKET, fill, probe_of, through
from benchmarks.harness import ROOT, Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

if TYPE_CHECKING:
    from tests.support.local_cluster import LocalCluster

_NODES = (1, 2, 4)


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import random

    import xxhash

    count, nbytes = (6, 2 << 20) if options.quick else (24, 12 << 20)
    chance = random.Random(0)
    keys, objects = {}, []
    for number in range(count):
        content = chance.randbytes(nbytes)
        keys[f"{BUCKET}/train/{number:03d}"] = xxhash.xxh3_64_hexdigest(content)
        objects.append((f"train/{number:03d}", content))
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(s3, objects)
        yield Prepared(
            {"options": through(region, s3), "keys": keys, "nbytes": count * nbytes},
            probe=probe_of(region),
            expected=0,
            notes=(f"{count} objects of {nbytes >> 20} MiB.", str(region.calibrate())),
        )


case = Case(name="cluster", title="One data set, read on several nodes", prepare=prepare, rounds=2)


def _obstore(measure: Measure, context: Mapping[str, Any], readers: int) -> int:
    program = (
        "import json, sys; from benchmarks.cases.cluster import read_with_obstore; "
        "print(read_with_obstore(json.loads(sys.stdin.readline()), int(sys.argv[1])), flush=True)"
    )
    for phase in ("first pass", "from each other"):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(number)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(readers)
        ]
        with measure(phase) as figures:
            wrong = 0
            outputs = []
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(dict(context)) + "\n")
                process.stdin.flush()
            for process in processes:
                outputs.append(process.communicate()[0])
            wrong += sum(int(output) for output in outputs)
            figures["read MB"] = readers * context["nbytes"] / 1e6
    return wrong


def read_with_obstore(context: Mapping[str, Any], seed: int) -> int:
    """Read everything once; gives how many objects were wrong."""
    import random

    import xxhash

    from benchmarks.buckets import obstore_client

    store = obstore_client(context["options"])
    keys = list(context["keys"])
    random.Random(seed).shuffle(keys)
    wrong = 0
    for key in keys:
        data = store.get(key.removeprefix(f"{BUCKET}/")).bytes()
        wrong += xxhash.xxh3_64_hexdigest(data) != context["keys"][key]
    return wrong


def _millrace(measure: Measure, context: Mapping[str, Any], nodes: int) -> int:
    from tests.support.local_cluster import LocalCluster

    with LocalCluster(Path(context["scratch"]), nodes, target_options=context["options"]) as cluster:
        with measure("first pass") as figures:
            wrong = _read(cluster, context)
            figures["read MB"] = nodes * context["nbytes"] / 1e6
        _drop_copies(cluster)
        with measure("from each other") as figures:
            wrong += _read(cluster, context)
            figures["read MB"] = nodes * context["nbytes"] / 1e6
    return wrong


def _read(cluster: LocalCluster, context: Mapping[str, Any]) -> int:
    readings = [cluster.read_on(node, context["keys"], seed=node.number) for node in cluster.nodes]
    reports = [reading.report() for reading in readings]
    for reading in readings:
        reading.stop()
    return sum(len(report["wrong"]) + len(report["errors"]) for report in reports)


def _drop_copies(cluster: LocalCluster) -> None:
    from millrace.cluster.membership import Member, View
    from millrace.cluster.placement import Placement
    from millrace.filesystem import filesystem

    placed = Placement(View.of(Member(id=node.address, address=node.address) for node in cluster.nodes))
    for node in cluster.nodes:
        fs = filesystem("s3", **cluster.arguments(node, members="none"))
        for entry in fs.node.entries():
            if placed.order(entry.object_id)[0].id != node.address:
                fs.free(f"s3://{entry.name.key}")


def _add(nodes: int) -> None:
    plain = f"obstore, one GET a file, {nodes} readers"

    @case.contender(plain)
    def _(measure: Measure, context: Mapping[str, Any]) -> int:
        return _obstore(measure, context, nodes)

    @case.contender(f"Millrace, {nodes} nodes", baseline=plain)
    def _(measure: Measure, context: Mapping[str, Any]) -> int:
        return _millrace(measure, context, nodes)


for _count in _NODES:
    _add(_count)
