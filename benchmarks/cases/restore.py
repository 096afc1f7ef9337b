"""Restore one checkpoint on four nodes at the same time, behind one link of 200 MB/s and 15 ms.

Each node is a network namespace with a node of the cluster and one training process. All nodes share the processors of this
machine, which real nodes do not: four restores decode four times as much on the same cores. Needs root.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import digest, parts_of, raw_bytes, tensors_of, trained
from benchmarks.harness import ROOT, Case, Measure, Options, Prepared
from benchmarks.memory_s3 import MemoryS3
from millrace.testing.region import EmulatedRegion

_NODES = 4
_PORT = 7070
_PARTS = ("fp32", "exp_avg", "exp_avg_sq")
_STOCK, _OURS = "s3://bucket/stock/step-1", "s3://bucket/run/step-1"


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import torch.distributed.checkpoint as dcp
    from tests.support.machines.namespaces import Machines
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    from millrace.checkpoint import CheckpointWriter

    file, about = trained(options)
    state = parts_of(file, *_PARTS)
    with MemoryS3(options.scratch / "s3.log") as s3, Machines(options.scratch / "machines", _NODES) as machines:
        dcp.save(
            state,
            storage_writer=FsspecWriter(_STOCK, sync_files=False, thread_count=2, **_fsspec_options(s3.endpoint_url)),
            no_dist=True,
        )
        writer = CheckpointWriter(_OURS, thread_count=2, target_options=_s3_options(s3.endpoint_url))
        dcp.save(state, storage_writer=writer, no_dist=True)
        with EmulatedRegion(s3.endpoint_url, host=machines.gateway) as region:

            def probe() -> dict[str, float]:
                return {"MB from the origin": region.stats().bytes_down / 1e6}

            yield Prepared(
                {
                    "state": str(file),
                    "endpoint_url": region.endpoint_url,
                    "addresses": [machine.address for machine in machines],
                    "prefixes": [machine.network_prefix for machine in machines],
                },
                probe=probe,
                expected=digest(state),
                notes=(
                    f"fp32 weights and both moments of AdamW, {raw_bytes(state) / 1e6:.0f} MB. {about}",
                    "Storage: an S3 server in memory behind an emulated link. The nodes share its cores and this link.",
                    str(region.calibrate()),
                ),
            )


case = Case(name="restore", title="Restoring a checkpoint on several nodes", prepare=prepare)


def _s3_options(endpoint_url: str) -> dict[str, Any]:
    return {"key": "any", "secret": "any", "endpoint_url": endpoint_url}


def _fsspec_options(endpoint_url: str) -> dict[str, Any]:
    # Checksums in trailers are for TLS; this endpoint is plain HTTP.
    return {**_s3_options(endpoint_url), "config_kwargs": {"request_checksum_calculation": "when_required"}}


def _restore(measure: Measure, context: Mapping[str, Any], kind: str, environs: list[dict[str, str]]) -> str:
    """Restore in one process on each node, all at the same time; returns the digest if all have the same."""
    import os

    program = (
        "import json, sys; from benchmarks.cases.restore import restore_here; restore_here(json.loads(sys.argv[1]))"
    )
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", program, json.dumps({**context, "kind": kind})],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for prefix, environ in zip(context["prefixes"], environs, strict=False)
    ]
    for process in processes:
        _line(process)  # it has imported everything and allocated its state
    with measure("restore") as figures:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            _line(process)
        figures["nodes"] = len(processes)
    digests = {process.communicate("digest\n")[0].strip() for process in processes}
    return "; ".join(sorted(digests))


def _line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"a restore ended with {process.wait()}")


def restore_here(context: Mapping[str, Any]) -> None:
    """Restore once in this process after a line on stdin; then print the digest."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    from millrace.checkpoint import CheckpointReader

    state = parts_of(context["state"], *_PARTS)
    for tensor in tensors_of(state):
        tensor.fill_(7)
    endpoint = context["endpoint_url"]
    reader: Any
    if context["kind"] == "stock":
        reader = FsspecReader(_STOCK, **_fsspec_options(endpoint))
    else:
        reader = CheckpointReader(
            _OURS, target_options=_s3_options(endpoint), thread_count=2, read_through=context["kind"]
        )
    print("ready", flush=True)
    sys.stdin.readline()
    dcp.load(state, storage_reader=reader, no_dist=True)
    print("done", flush=True)
    sys.stdin.readline()
    print(digest(state), flush=True)


def _through_cluster(measure: Measure, context: Mapping[str, Any], nodes: int) -> str:
    from tests.support.local_cluster import TOKEN, LocalCluster

    with LocalCluster(
        Path(context["scratch"]),
        nodes,
        target_options=_s3_options(context["endpoint_url"]),
        hosts=[f"{address}:{_PORT}" for address in context["addresses"][:nodes]],
        prefixes=dict(enumerate(context["prefixes"][:nodes])),
    ) as cluster:
        environs = [
            {
                "MILLRACE_CACHE_DIR": str(node.cache_dir),
                "MILLRACE_MIN_FREE": "0",
                "MILLRACE_MEMBERS": cluster.members,
                "MILLRACE_CLUSTER_TOKEN": TOKEN,
            }
            for node in cluster.nodes
        ]
        return _restore(measure, context, "cluster", environs)


def _add(nodes: int) -> None:
    word = "1 node" if nodes == 1 else f"{nodes} nodes"
    alone = "Millrace from the storage, 1 node"

    @case.contender(f"stock DCP over s3fs, {word}", baseline=alone)
    def _(measure: Measure, context: Mapping[str, Any]) -> str:
        return _restore(measure, context, "stock", [{}] * nodes)

    @case.contender(f"Millrace from the storage, {word}", baseline=alone)
    def _(measure: Measure, context: Mapping[str, Any]) -> str:
        return _restore(measure, context, "none", [{}] * nodes)

    @case.contender(f"Millrace through the cluster, {word}", baseline=alone)
    def _(measure: Measure, context: Mapping[str, Any]) -> str:
        return _through_cluster(measure, context, nodes)


for _count in (1, _NODES):
    _add(_count)
