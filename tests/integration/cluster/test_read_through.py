"""Restores through the cluster: `CheckpointManager(url, read_through="cluster")` and the other readers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from tests.support import patience
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.harms import flip, kept_times
from tests.support.local_cluster import TOKEN, LocalCluster, LocalNode
from tests.support.states import assert_same_state

from millrace.cache.node import close_nodes
from millrace.checkpoint import CheckpointManager, CheckpointReader, CheckpointWriter, load_weights
from millrace.cluster.attach import close_all
from millrace.errors import ConfigurationError
from millrace.events import add_hook
from millrace.filesystem import filesystem
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")

PROGRAM = (
    patience.CODE
    + """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch, xxhash
from millrace.checkpoint import CheckpointManager
settings = json.loads(sys.argv[1])
state = {name: torch.empty(shape) for name, shape in settings["shapes"].items()}
with CheckpointManager(settings["url"], target_options=settings["target_options"], **settings["manager"]) as run:
    step = run.restore(state)
print(json.dumps([step, {name: xxhash.xxh3_64_intdigest(tensor.numpy()) for name, tensor in state.items()}]))
"""
)


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer-{number}": torch.randn(1000, 1000 + number, generator=generator) for number in range(8)}


def empty(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return make_state()


def variables(cluster: LocalCluster, node: LocalNode) -> dict[str, str]:
    """The environment of a process on a node's machine."""
    return {
        "MILLRACE_CACHE_DIR": str(node.cache_dir),
        "MILLRACE_MIN_FREE": "0",
        "MILLRACE_MEMBERS": cluster.members,
        "MILLRACE_CLUSTER_TOKEN": TOKEN,
    }


def join(monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster, node: LocalNode) -> None:
    """Make this process one of a node's machine."""
    close_all()
    for name, value in variables(cluster, node).items():
        monkeypatch.setenv(name, value)


def save(url: str, s3: S3Server, *steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """Save the state of each step without a cluster; returns the last one."""
    with CheckpointManager(url, target_options=s3.target_options, read_through="none", **options) as run:
        for step in steps:
            run.save(step, make_state(step))
    return make_state(steps[-1])


def nbytes(s3: S3Server, bucket: str) -> int:
    direct = filesystem("s3", s3.target_options, members="none")
    found = direct.find(f"{bucket}/run", detail=True).values()
    return sum(entry["size"] for entry in found if "/step-" in entry["name"])


def bytes_down(region: EmulatedRegion, bucket: str) -> int:
    return region.stats(f"/{bucket}/").by_kind["GET"].bytes_down


def cached_files(cluster: LocalCluster) -> dict[int, set[str]]:
    """The checkpoint files that each node has cached, by the number of the node."""
    found = {}
    for node in cluster.nodes:
        fs = filesystem("s3", **cluster.arguments(node))
        fs.node.open_disks[0].write_down_uses()
        found[node.number] = {each.key for each in fs.cached() if each.key.endswith(".millrace")}
    return found


def start(
    cluster: LocalCluster, node: LocalNode, url: str, options: Mapping[str, Any], *, ranks: int = 1, **manager: Any
) -> ForkedProcess:
    shapes = {name: list(tensor.shape) for name, tensor in make_state().items()}
    settings = {"url": url, "shapes": shapes, "target_options": dict(options), "manager": manager}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "AWS_"))}
    environ["LOCAL_WORLD_SIZE"] = str(ranks)  # as torchrun sets it
    environ.update(variables(cluster, node))
    log = node.directory / "restore.log"
    return ForkedProcess(torch_server(), PROGRAM, json.dumps(settings), log=log, env=environ, pipes=True)


def sums(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: xxhash.xxh3_64_intdigest(tensor.numpy()) for name, tensor in state.items()}


# --- each byte once -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_restore_on_three_nodes_reads_each_data_byte_once(
    tmp_path: Path, s3: S3Server, bucket: str, region: EmulatedRegion, options: dict[str, Any], ranks: int
) -> None:
    url = f"s3://{bucket}/run"
    state = save(url, s3, 3)
    with LocalCluster(tmp_path, 3, target_options=options, patient=True) as cluster:
        nodes = [node for node in cluster.nodes for _ in range(ranks)]
        with contextlib.ExitStack() as running:
            programs = [
                running.enter_context(start(cluster, node, url, options, ranks=ranks)) for node in nodes
            ]  # "auto"
            for program in programs:
                assert json.loads(program.output()) == [3, sums(state)]
        total = nbytes(s3, bucket)
        assert total <= bytes_down(region, bucket) <= 1.02 * total
        # Each byte is sent to the two nodes that do not own it, once to each, however many ranks they have.
        assert cluster.counters()["peer_bytes"] <= 2.5 * total
        if ranks == 1:
            files = [name for names in cached_files(cluster).values() for name in names]
            assert len(files) == len(set(files))  # only their owners store them


@pytest.mark.slow
def test_restore_without_the_cluster_reads_the_origin_each_time(
    tmp_path: Path, s3: S3Server, bucket: str, region: EmulatedRegion, options: dict[str, Any]
) -> None:
    url = f"s3://{bucket}/run"
    state = save(url, s3, 3)
    with LocalCluster(tmp_path, 1, target_options=options, patient=True) as cluster:
        for _ in range(2):
            with start(cluster, cluster.nodes[0], url, options, read_through="none") as program:
                assert json.loads(program.output()) == [3, sums(state)]
        assert bytes_down(region, bucket) >= 2 * nbytes(s3, bucket)
        assert cached_files(cluster) == {0: set()}


@pytest.mark.usefixtures("patient_peers")
def test_every_reader_shares_the_cached_bytes(
    tmp_path: Path,
    s3: S3Server,
    bucket: str,
    region: EmulatedRegion,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"s3://{bucket}/run/step-000000000001"
    state = make_state()
    dcp.save(state, storage_writer=CheckpointWriter(url, target_options=s3.target_options))
    with LocalCluster(tmp_path, 2, target_options=options, patient=True) as cluster:
        join(monkeypatch, cluster, cluster.nodes[0])
        loaded = empty(state)
        dcp.load(loaded, storage_reader=CheckpointReader(url, target_options=options))
        assert_same_state(loaded, state)
        assert_same_state(load_weights(url, target_options=options), state)
        restored = empty(state)
        with CheckpointManager(f"s3://{bucket}/run", target_options=options, read_through="cluster") as run:
            assert run.restore(restored) == 1
        assert_same_state(restored, state)
        assert bytes_down(region, bucket) <= 1.02 * nbytes(s3, bucket)


@pytest.mark.usefixtures("patient_peers")
def test_stock_checkpoint_is_read_through_the_cluster(
    tmp_path: Path,
    s3: S3Server,
    bucket: str,
    region: EmulatedRegion,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = make_state()
    folder = tmp_path / "stock"
    dcp.save(state, checkpoint_id=str(folder))
    direct = filesystem("s3", s3.target_options, members="none")
    for file in folder.iterdir():
        direct.pipe_file(f"{bucket}/run/step-1/{file.name}", file.read_bytes())
    with LocalCluster(tmp_path, 2, target_options=options, patient=True) as cluster:
        join(monkeypatch, cluster, cluster.nodes[0])
        for _ in range(3):
            loaded = empty(state)
            reader = CheckpointReader(f"s3://{bucket}/run/step-1", target_options=options, read_through="cluster")
            dcp.load(loaded, storage_reader=reader)
            assert_same_state(loaded, state)
        assert bytes_down(region, bucket) <= 1.02 * nbytes(s3, bucket)


@pytest.mark.usefixtures("patient_peers")
def test_rank_reads_only_its_part(
    tmp_path: Path,
    s3: S3Server,
    bucket: str,
    region: EmulatedRegion,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"s3://{bucket}/run"
    state = save(url, s3, 1)
    with LocalCluster(tmp_path, 2, target_options=options, patient=True) as cluster:
        join(monkeypatch, cluster, cluster.nodes[0])
        part = empty(state)
        with CheckpointManager(url, target_options=options, read_through="cluster") as run:
            run.restore(part, keys="layer-3")
        assert torch.equal(part["layer-3"], state["layer-3"])
        assert bytes_down(region, bucket) < nbytes(s3, bucket) / 2


# --- never stale, never mixed -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("patient_peers")
def test_overwritten_checkpoint_is_read_in_its_new_version(
    tmp_path: Path, s3: S3Server, bucket: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/run/step-1"
    with LocalCluster(tmp_path, 2, target_options=options, patient=True) as cluster:
        join(monkeypatch, cluster, cluster.nodes[0])
        for seed in range(4):
            state = make_state(seed)
            dcp.save(state, storage_writer=CheckpointWriter(url, target_options=s3.target_options, overwrite=True))
            loaded = empty(state)
            dcp.load(loaded, storage_reader=CheckpointReader(url, target_options=options, read_through="cluster"))
            assert_same_state(loaded, state)


@pytest.mark.slow
@pytest.mark.usefixtures("patient_peers")
def test_step_that_was_rewound_and_saved_again_is_read_in_its_new_version(
    tmp_path: Path, s3: S3Server, bucket: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/run"
    with LocalCluster(tmp_path, 2, target_options=options, patient=True) as cluster:
        join(monkeypatch, cluster, cluster.nodes[1])
        for seed in range(3):
            state = make_state(seed)
            with CheckpointManager(url, target_options=s3.target_options, rewind=True, read_through="none") as run:
                run.save(7, state)
            restored = empty(state)
            with CheckpointManager(url, target_options=options, read_through="cluster") as run:
                assert run.restore(restored) == 7
            assert_same_state(restored, state)


# --- pruning ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["save", "save_async"])
@pytest.mark.usefixtures("patient_peers")
def test_pruned_step_is_dropped_on_every_node(
    tmp_path: Path,
    s3: S3Server,
    bucket: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    is_async: bool,
) -> None:
    url = f"s3://{bucket}/run"
    save(url, s3, 1, 2, full_every=1)
    with LocalCluster(tmp_path, 3, target_options=options, patient=True) as cluster:
        for node in cluster.nodes[:2]:
            join(monkeypatch, cluster, node)
            for step in (1, 2):
                restored = empty(make_state())
                with CheckpointManager(url, target_options=options, read_through="cluster") as run:
                    run.restore(restored, step)
        before = cached_files(cluster)
        assert any("step-000000000001" in name for names in before.values() for name in names)
        with CheckpointManager(
            url, target_options=options, keep=1, full_every=1, independent=False, rewind=True
        ) as run:
            run.restore(empty(make_state()))
            if is_async:
                run.save_async(3, make_state(3)).result()
            else:
                run.save(3, make_state(3))
            assert run.steps() == [3]
        assert all(not names for names in cached_files(cluster).values())


# --- faults -------------------------------------------------------------------------------------------


def test_restore_continues_from_the_origin_when_all_nodes_are_gone(
    tmp_path: Path, s3: S3Server, bucket: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/run"
    state = save(url, s3, 1)
    with LocalCluster(tmp_path, 3, target_options=options) as cluster:
        join(monkeypatch, cluster, cluster.nodes[0])
        for node in cluster.nodes:
            node.kill()
        restored = empty(state)
        with CheckpointManager(url, target_options=options, read_through="cluster") as run:
            assert run.restore(restored) == 1
        assert_same_state(restored, state)


@pytest.mark.slow
def test_silent_node_costs_one_deadline(
    tmp_path: Path, s3: S3Server, bucket: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/run/step-1"
    state = make_state()
    # One data file, so that one of the two nodes is not its owner.
    dcp.save(state, storage_writer=CheckpointWriter(url, target_options=s3.target_options, thread_count=1))
    with LocalCluster(tmp_path, 2, target_options=options) as cluster:
        failures: list[str] = []
        waited = 0
        remove = add_hook(lambda event: failures.append(event.subject) if event.name == "peer.failed" else None)
        try:
            for node in cluster.nodes:
                failures.clear()
                join(monkeypatch, cluster, node)
                cluster.nodes[1 - node.number].suspend()
                loaded = empty(state)
                reader = CheckpointReader(url, target_options=options, read_through="cluster", thread_count=1)
                dcp.load(loaded, storage_reader=reader)
                assert_same_state(loaded, state)
                cluster.nodes[1 - node.number].resume()
                # Of at least four ranges the first one waits. Its blocks are up to two requests at the same time.
                assert len(failures) <= 2
                waited += len(failures)
        finally:
            remove()
        assert waited  # at least one of the nodes does not own the data file


def test_damaged_cached_bytes_are_read_again_and_not_restored(
    tmp_path: Path, s3: S3Server, bucket: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/run"
    state = save(url, s3, 1)
    with LocalCluster(tmp_path, 1, target_options=options, patient=True) as cluster:
        node = cluster.nodes[0]
        join(monkeypatch, cluster, node)
        with CheckpointManager(url, target_options=options, read_through="cluster") as run:
            assert run.restore(empty(state)) == 1
            files = [path for path in (node.cache_dir / "millrace" / "local" / "objects").rglob("*") if path.is_file()]
            assert files
            for path in files:
                with kept_times(path):
                    for place in range(5000, path.stat().st_size // 2, 1 << 20):
                        flip(path, place)
            restored = empty(state)
            assert run.restore(restored) == 1
            assert_same_state(restored, state)


def test_unusable_cache_directory_does_not_stop_a_restore(
    tmp_path: Path, s3: S3Server, bucket: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/run"
    state = save(url, s3, 1)
    with LocalCluster(tmp_path, 1, target_options=options, patient=True) as cluster:
        join(monkeypatch, cluster, cluster.nodes[0])
        (tmp_path / "file").write_text("not a directory")
        monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "file" / "below"))
        restored = empty(state)
        with CheckpointManager(url, target_options=options) as run:
            assert run.restore(restored) == 1
        assert_same_state(restored, state)
    close_nodes()


# --- the option ---------------------------------------------------------------------------------------


def test_auto_without_a_cluster_uses_no_cache(
    tmp_path: Path, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/run"
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    state = save(url, s3, 1)
    restored = empty(state)
    with CheckpointManager(url, target_options=s3.target_options) as run:
        assert run.restore(restored) == 1
    assert_same_state(restored, state)
    assert not (tmp_path / "cache" / "millrace" / "local").exists()


def test_cluster_without_a_cluster_is_an_error(s3: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/run"
    state = save(url, s3, 1)
    with (
        CheckpointManager(url, target_options=s3.target_options, read_through="cluster") as run,
        pytest.raises(ConfigurationError, match=r"without a cluster.*MILLRACE_MEMBERS"),
    ):
        run.restore(empty(state))


def test_wrong_values_are_errors(tmp_path: Path) -> None:
    for wrong in ("always", None, True, ["auto"]):
        with pytest.raises(ConfigurationError, match=r"read_through=.*'auto', 'cluster' or 'none'"):
            CheckpointManager(tmp_path / "run", read_through=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="read_through="):
            CheckpointReader("s3://bucket/step-1", read_through=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="local files are not read through the cluster"):
        CheckpointManager(tmp_path / "run", read_through="cluster")
