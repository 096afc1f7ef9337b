"""A cached model as files (`fs.local_folder`) compared with the same files on the local disk: `safe_open` of all tensors,
`from_pretrained`, and `cmp`.

The model is loaded once from a real S3 server, through the emulated region, into a cache on the same disk. Contenders then
read it warm, each in a process of its own. What the folder itself costs is a phase of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.buckets import BUCKET, fill, probe_of, through
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_REPEATS = 3


def _save_model(folder: Path, *, quick: bool) -> None:
    import transformers

    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 256, "n_head": 4} if quick else {"n_layer": 12, "n_embd": 1024, "n_head": 16}
    config = transformers.GPT2Config(vocab_size=32_000, n_positions=128, **shape)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="200MB")


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import millrace
    from millrace.cache.node import close_nodes

    model, cache = options.scratch / "model", options.scratch / "cache"
    _save_model(model, quick=options.quick)
    shutil.copytree(model, options.scratch / "other")  # for `cmp`, which does not read a file that is the same
    names = sorted(path.name for path in model.iterdir())
    nbytes = sum(path.stat().st_size for path in model.iterdir())
    with S3Server(options.scratch / "s3") as s3, EmulatedRegion(s3.endpoint_url) as region:
        fill(s3, ((f"model/{name}", model / name) for name in names))
        given = {"target_options": through(region, s3), "cache_dir": str(cache), "min_free": 0}
        with millrace.filesystem("s3", **given).local_folder(f"s3://{BUCKET}/model"):
            used = sum(
                path.stat().st_blocks * 512 for path in cache.glob("millrace/local/[so]*/**/*") if path.is_file()
            )
        close_nodes()
        yield Prepared(
            {"model": str(model), "other": str(options.scratch / "other"), "given": given},
            probe=probe_of(region),
            notes=(
                f"{len(names)} files, {nbytes:,} bytes; {used / nbytes:.3f} of it on the disk as blocks of the cache, "
                "folder included",
                str(region.calibrate()),
            ),
        )


case = Case(name="files", title="A cached model as files", prepare=prepare, baseline="local files")


def _read(measure: Measure, folder: Path, other: str) -> list[float]:
    import transformers
    from safetensors import safe_open

    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:  # both contenders find the pages in memory
        shard.read_bytes()
    found = []
    with measure("safe_open, every tensor") as figures:
        for _ in range(_REPEATS):
            total = 0.0
            for shard in shards:
                with safe_open(shard, "pt") as opened:
                    total += sum(opened.get_tensor(name).double().sum().item() for name in opened.keys())  # noqa: SIM118
            found.append(total)
        figures["raw GB"] = _REPEATS * sum(shard.stat().st_size for shard in shards) / 1e9
    with measure("from_pretrained"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found.append(sum(parameter.double().sum().item() for parameter in model.parameters()))
    with measure("cmp"):
        for shard in shards:
            subprocess.run(["cmp", str(shard), f"{other}/{shard.name}"], check=True)
    return found


@case.contender("local files")
def local(measure: Measure, context: Mapping[str, Any]) -> list[float]:
    torch.set_num_threads(1)
    return _read(measure, Path(context["model"]), context["other"])


@case.contender("Millrace, local_folder")
def cached(measure: Measure, context: Mapping[str, Any]) -> list[float]:
    import millrace

    torch.set_num_threads(1)
    fs = millrace.filesystem("s3", **context["given"])
    with measure("the folder"):
        folder = fs.local_folder(f"s3://{BUCKET}/model")
        path = folder.__enter__()
    try:
        return _read(measure, Path(path), context["other"])
    finally:
        folder.__exit__(None, None, None)
