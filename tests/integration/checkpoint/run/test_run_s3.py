"""A run on a real S3 server: the requests of a listing, claims, and pruning."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.runs import add_checkpoint, add_file, assert_whole, complete, data_name, own_paths, race_for_claims

from millrace.checkpoint import CheckpointManager, CheckpointReader, CheckpointWriter
from millrace.checkpoint.run.claims import Claim, dead_saves
from millrace.checkpoint.run.pruning import prune
from millrace.checkpoint.run.run_layout import Run, _ObjectPlace, checkpoint_name, open_run
from millrace.checkpoint.storage.object_storage import ObjectStorage
from millrace.errors import ObjectNotFoundError, RunTakenError
from millrace.origin.object_store import ObjectStoreOrigin
from millrace.testing.region import EmulatedRegion

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def open_on(runs_server, name: str) -> Run:
    return open_run(f"s3://runs/{name}", runs_server.target_options)


class CountingOrigin(ObjectStoreOrigin):
    """Counts the requests to the real server."""

    def __init__(self, runs_server) -> None:
        super().__init__("s3", runs_server.target_options)
        self.pages = self.heads = self.reads = 0

    def list_pages(self, prefix, **options):
        for page in super().list_pages(prefix, **options):
            self.pages += 1
            yield page

    def list_level(self, prefix):
        self.pages += 1
        return super().list_level(prefix)

    def head(self, key):
        self.heads += 1
        return super().head(key)

    def read(self, *args, **options):
        self.reads += 1
        return super().read(*args, **options)

    def take(self) -> tuple[int, int, int]:
        """Listings, heads and reads since the last time."""
        counts = self.pages, self.heads, self.reads
        self.pages = self.heads = self.reads = 0
        return counts


@pytest.mark.slow
def test_listing_of_run_needs_the_documented_requests(runs_server):
    origin = CountingOrigin(runs_server)
    url, key = "s3://runs/large", "runs/large"
    run = Run(ObjectStorage(url, origin, key), _ObjectPlace(url, origin, key))
    claim = Claim.take(run)
    for step in range(30):
        add_checkpoint(run, step, files=4)
    for number in range(950):
        origin.put(f"{key}/{checkpoint_name(99)}/data-{number}-0-0.millrace", b"x")
    origin.put(f"{key}/zebra/notes.txt", b"foreign")
    origin.take()
    found = run.scan()
    assert origin.take() == (2, 0, 0)  # 1102 objects
    assert [each.step for each in found] == [*range(30), 99]
    assert [each.complete for each in found] == [True] * 30 + [False]
    assert len(run.describe_all(found[:-1])) == 30
    assert origin.take() == (0, 0, 30)
    assert len(run.describe_all(found[:-1])) == 30
    assert origin.take() == (0, 0, 0)
    claim.check()
    assert origin.take() == (1, 0, 0)
    prune(run, 25)
    # One listing of the run, the claims, and each manifest that goes is looked at once more before.
    assert origin.take() == (3, 1 + 5, 1)
    assert complete(run) == [checkpoint_name(step) for step in range(5, 30)]
    assert_whole(run)


def test_missing_run_is_empty_or_raises(runs_server):
    assert open_on(runs_server, "nothing").scan() == []
    with pytest.raises(ObjectNotFoundError, match="s3://nowhere/run"):
        open_run("s3://nowhere/run", runs_server.target_options).scan()


def test_runs_next_to_each_other_are_separate(runs_server):
    """A run whose name begins like another's is another run."""
    near, other = open_on(runs_server, "near"), open_on(runs_server, "near-2")
    add_checkpoint(near, 1)
    add_checkpoint(other, 2)
    add_checkpoint(open_on(runs_server, "near/deep"), 3)
    assert complete(near) == [checkpoint_name(1)]
    assert complete(other) == [checkpoint_name(2)]
    Claim.take(other)
    assert near.files("writer-") == []


def test_real_checkpoints_are_pruned_and_the_kept_load(runs_server):
    run = open_on(runs_server, "real")
    states = {step: {"x": torch.randn(50_000), "step": step} for step in (1, 2, 3)}
    for step, state in states.items():
        record = {"step": step, "kind": "full", "full": checkpoint_name(step), "metrics": {"loss": abs(step - 2.0)}}
        writer = CheckpointWriter(
            run.url_of(checkpoint_name(step)),
            target_options=runs_server.target_options,
            user_metadata={"run": record, "user": {"step": step}},
        )
        dcp.save(state, storage_writer=writer)
    add_file(run, checkpoint_name(9), data_name())
    report = prune(run, "best=loss")
    assert (report.removed, report.kept) == ((checkpoint_name(1),), (checkpoint_name(2), checkpoint_name(3)))
    for step in (2, 3):
        loaded = {"x": torch.zeros(50_000), "step": None}
        reader = CheckpointReader(run.url_of(checkpoint_name(step)), target_options=runs_server.target_options)
        dcp.load(loaded, storage_reader=reader)
        assert loaded["step"] == step
        assert torch.equal(loaded["x"], states[step]["x"])
    assert [found.step for found in run.scan()] == [2, 3, 9]


def test_chain_through_siblings_is_pruned(runs_server):
    run = open_on(runs_server, "chain")
    first = add_checkpoint(run, 1, files=2)
    second = add_checkpoint(run, 2, siblings=own_paths(first)[:1])
    add_checkpoint(run, 3, siblings=[*own_paths(first)[:1], *own_paths(second)])
    report = prune(run, 1)
    assert_whole(run)
    assert report.deleted_files == 3
    assert report.freed_bytes == first.manifest.size + second.manifest.size + first.files[1].size
    assert run.files("pruning-") == []


# --- claims ---------------------------------------------------------------------------------------


def test_restores_of_a_run_move_at_most_twice_the_bytes_of_a_full_one(runs_server):
    generator = torch.Generator().manual_seed(1)
    frozen, half, single = (torch.randn(500_000, generator=generator) for _ in range(3))
    state = {"frozen": frozen, "half": half.to(torch.bfloat16), "single": single}
    saved, kinds, moved_bytes = {}, [], {}
    with EmulatedRegion(runs_server.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        options = {**runs_server.target_options, "endpoint_url": region.endpoint_url}
        with CheckpointManager("s3://runs/ten", target_options=options) as run:
            for step in range(1, 11):
                for key in ("half", "single"):
                    state[key] *= 1 + 0.01 * torch.randn(500_000, generator=generator).to(state[key].dtype)
                kinds.append(run.save(step, state).kind)
                saved[step] = {key: value.clone() for key, value in state.items()}
        assert kinds[0] == "full"
        assert kinds.count("delta") >= 5
        for step, expected in saved.items():
            found = {key: torch.zeros_like(value) for key, value in expected.items()}
            with CheckpointManager("s3://runs/ten", target_options=options) as run:
                before = region.stats().bytes_down
                assert run.restore(found, step) == step
                moved_bytes[step] = region.stats().bytes_down - before
            assert all(torch.equal(found[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected)
    assert max(moved_bytes.values()) > moved_bytes[1], "a chain costs something"
    # Listings, manifests and headers included.
    assert max(moved_bytes.values()) <= 2 * moved_bytes[1], moved_bytes


def test_claims_on_server_have_one_owner(runs_server):
    run = open_on(runs_server, "claims")
    first = Claim.take(run)
    first.check()
    first.announce([checkpoint_name(1)])
    first.check()
    second = Claim.take(run)
    second.check()
    with pytest.raises(RunTakenError, match="s3://runs/claims"):
        first.check()
    assert [file.name for file in run.files("writer-")] == ["writer-000000000002.json"]
    second.release()
    assert Claim.take(run, wait_seconds=0).number == 3


_HOLDER = """
import json, sys
from millrace.checkpoint.run.claims import Claim
from millrace.checkpoint.run.run_layout import open_run
claim = Claim.take(open_run(sys.argv[1], json.loads(sys.argv[2])), wait_seconds=0)
claim.announce(["step-000000000007"])
print(claim.number, flush=True)
sys.stdin.readline()
"""


def test_claim_of_killed_process_on_server_is_replaced(runs_server):
    run = open_on(runs_server, "killed")
    arguments = [sys.executable, "-c", _HOLDER, run.url, json.dumps(runs_server.target_options)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"1\n"
            with pytest.raises(RunTakenError, match=f"pid {holder.pid}"):
                Claim.take(run, wait_seconds=0)
        finally:
            holder.send_signal(signal.SIGKILL)
        holder.stdin.close()
        holder.wait()
    assert Claim.take(run, wait_seconds=0).number == 2
    assert dead_saves(run) == {checkpoint_name(7)}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", "local"])
def test_one_of_eight_processes_gets_each_claim(runs_server, tmp_path, place):
    url, options = ("s3://runs/race", runs_server.target_options) if place == "s3" else (str(tmp_path / "race"), None)
    open_run(url, options).storage.prepare()
    turns, count = 8, 8
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["millrace.checkpoint.run.claims"])
    start, results = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=race_for_claims, args=(url, options, turns, start, results)) for _ in range(count)
    ]
    for process in processes:
        process.start()
    won = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    for turn in range(turns):
        winners = [each[turn] for each in won if each[turn] is not None]
        assert winners == [turn + 1]
    assert len(open_run(url, options).files("writer-")) == 1
