"""The sources of reads in a Ray cluster of three nodes: Ray Data's own read compared with `read_near`, over epochs.

The nodes are three raylets of this machine, with a cache each, which together hold one and a half times the data: there is
some room for copies of what others own, not for all. So the bytes between the nodes matter more than the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, fill, probe_of, through
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_NODES = 3


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import random

    count, nbytes, epochs = (48, 64 << 10, 3) if options.quick else (384, 256 << 10, 5)
    chance = random.Random(0)
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(s3, [(f"train/{number:04d}", chance.randbytes(nbytes)) for number in range(count)])
        yield Prepared(
            {
                "options": through(region, s3),
                "epochs": epochs,
                "blocks": 48 if options.quick else 96,
                "capacity": count * nbytes // 2,
            },
            probe=probe_of(region),
            expected=[[count, count * nbytes]] * epochs,
            notes=(
                f"{count} files of {nbytes >> 10} KiB on {_NODES} nodes of one CPU, {epochs} epochs, shuffled by file; "
                "'local' is the share of the bytes that came from the disk of the node that decoded them.",
                str(region.calibrate()),
            ),
        )


case = Case(
    name="locality", title="Reads where the data lies", prepare=prepare, baseline="Ray Data's own read", rounds=2
)


def _run(measure: Measure, context: Mapping[str, Any], make: Callable[..., Any]) -> list[list[int]]:
    import ray
    from tests.support.raylets import raylets

    import millrace
    from millrace.ray import cluster_counters

    def decoded(dataset: Any) -> Any:
        return dataset.map_batches(_measured, batch_size=None)

    fs = millrace.filesystem(
        "s3",
        target_options=context["options"],
        cache_dir=str(Path(context["scratch"]) / "cache"),
        capacity=context["capacity"],
        min_free=0,
        consistency="immutable",
    )
    results = []
    with raylets(_NODES):
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        dataset = make(
            fs,
            decoded,
            shuffle=ray.data.FileShuffleConfig(seed=1),
            override_num_blocks=context["blocks"],
        )
        for phase, epochs in (("first epoch", 1), ("later epochs", context["epochs"] - 1)):
            before = cluster_counters(fs)
            with measure(phase) as figures:
                for _ in range(epochs):
                    rows = dataset.take_all()
                    results.append([sum(row["files"] for row in rows), sum(row["nbytes"] for row in rows)])
                after = cluster_counters(fs)
                read = {name: after[name] - before[name] for name in after}
                figures["local"] = read["cache_bytes"] / sum(
                    read[f"{kind}_bytes"] for kind in ("cache", "peer", "origin")
                )
                figures["from nodes MB"] = read["peer_bytes"] / 1e6
                figures["epochs"] = epochs
    return results


def _measured(batch: dict[str, Any]) -> dict[str, Any]:
    return {"files": [len(batch["bytes"])], "nbytes": [sum(map(len, batch["bytes"]))]}


@case.contender("Ray Data's own read")
def plain(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    def make(fs: Any, decoded: Callable[[Any], Any], **options: Any) -> Any:
        import ray.data

        from millrace.cluster.attach import link_for
        from millrace.filesystem.cluster_loading import start_everywhere

        start_everywhere(fs._options, link_for(fs._options, fs.origin).views)  # as read_near does
        return decoded(ray.data.read_binary_files(f"s3://{BUCKET}/train", filesystem=fs, **options))

    return _run(measure, context, make)


@case.contender("read_near")
def near(measure: Measure, context: Mapping[str, Any]) -> list[list[int]]:
    def make(fs: Any, decoded: Callable[[Any], Any], **options: Any) -> Any:
        import ray.data

        from millrace.ray import read_near

        return read_near(ray.data.read_binary_files, f"s3://{BUCKET}/train", filesystem=fs, then=decoded, **options)

    return _run(measure, context, make)
