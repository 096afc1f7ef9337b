"""Four nodes that restore one checkpoint, or open one model, at the same time: each byte leaves the origin once."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import save as save_safetensors
from tests.support import patience
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.local_cluster import LocalCluster

from millrace.checkpoint import CheckpointWriter
from millrace.filesystem import filesystem
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

PROGRAM = (
    patience.CODE
    + """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
import torch.distributed.checkpoint as dcp
import xxhash
import millrace
from millrace.checkpoint import CheckpointReader
settings = json.loads(sys.argv[1])
fs = millrace.filesystem("s3", **settings["options"])
if settings["what"] == "checkpoint":
    state = {name: torch.empty(shape) for name, shape in settings["shapes"].items()}
    dcp.load(state, storage_reader=CheckpointReader(settings["url"], origin=fs.as_origin()))
else:
    from safetensors.torch import load
    with fs.open(settings["url"]) as file:
        state = load(file.read())
print(json.dumps({name: xxhash.xxh3_64_hexdigest(tensor.numpy()) for name, tensor in state.items()}))
"""
)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer-{number}": torch.randn(500, 1000 + number, generator=generator) for number in range(8)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")
@pytest.mark.parametrize("what", ["checkpoint", "model"])
def test_restore_on_four_nodes_reads_the_origin_once(
    tmp_path: Path, s3: S3Server, bucket: str, region: EmulatedRegion, state: dict[str, torch.Tensor], what: str
) -> None:
    direct = filesystem("s3", s3.target_options, members="none")
    if what == "checkpoint":
        url = f"s3://{bucket}/run/step-1"
        dcp.save(state, storage_writer=CheckpointWriter(url, target_options=s3.target_options))
    else:
        url = f"{bucket}/run/model.safetensors"
        direct.pipe(url, save_safetensors(state))
    total = sum(entry["size"] for entry in direct.find(f"{bucket}/run", detail=True).values())
    options = {**s3.target_options, "endpoint_url": region.endpoint_url}
    with (
        LocalCluster(tmp_path, 4, target_options=options, patient=True) as cluster,
        contextlib.ExitStack() as running,
    ):
        programs = []
        for node in cluster.nodes:
            settings = {
                "what": what,
                "url": url,
                "shapes": {name: list(tensor.shape) for name, tensor in state.items()},
                "options": cluster.arguments(node),
            }
            log = node.directory / "restore.log"
            program = ForkedProcess(torch_server(), PROGRAM, json.dumps(settings), log=log, pipes=True)
            programs.append(running.enter_context(program))
        expected = {name: xxhash.xxh3_64_hexdigest(tensor.numpy()) for name, tensor in state.items()}
        for program in programs:
            assert json.loads(program.output()) == expected
        assert region.stats(f"/{bucket}/").by_kind["GET"].bytes_down == total
