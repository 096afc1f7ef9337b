"""A training that is killed and resumed in a new process, compared with an uninterrupted one: equal bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support import ranks
from tests.support.fork_server import PATH, ForkedProcess, torch_server
from torch import nn
from torch.utils.data import DataLoader, Dataset

from millrace.checkpoint import (
    CheckpointLoadPlanner,
    CheckpointManager,
    CheckpointReader,
    CheckpointWriter,
    DataPosition,
    RandomState,
    ResumableSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SAMPLES, BATCH, EPOCHS = 50, 4, 3
STEPS = EPOCHS * 13
SAVE_EVERY = 3


# --- the training (this file is its own program) --------------------------------------------------


class Noisy(Dataset):
    """Augmented in the worker that makes it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        features = torch.sin(torch.arange(16) * (index + 1.0))
        return index, features + 0.1 * torch.randn(16), features[:1] * 2


def train(seed: int, run: pathlib.Path, log: pathlib.Path, *, is_doomed: bool) -> None:
    """Everything that `seed` begins differently has to come from the checkpoint. One that is doomed has no last step."""
    torch.set_num_threads(1)
    random.seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    position = DataPosition(loader, seed=seed)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": position,
        "random": RandomState(),
    }
    with CheckpointManager(run, keep=3) as manager, open(log, "w", buffering=1) as lines:
        step = manager.restore(state) or 0
        for epoch in range(position.epoch, EPOCHS):
            for indices, features, wanted in position:
                loss = nn.functional.mse_loss(model(features), wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                about = [step, epoch, indices.tolist(), loss.item().hex(), scheduler.get_last_lr()]
                lines.write(json.dumps(about) + "\n")
                print(step, flush=True)
                if step % SAVE_EVERY == 0:
                    manager.save_async(step, state)
                if is_doomed and step == STEPS - 1:
                    time.sleep(600)
        weights = [value.tolist() for value in model.state_dict().values()]
        moments = [value.tolist() for moments in optimizer.state.values() for value in moments.values()]
        lines.write(json.dumps([weights, moments, torch.rand(3).tolist(), random.random()]) + "\n")


def read(log: pathlib.Path) -> list[Any]:
    return [json.loads(line) for line in log.read_text().splitlines()]


# --- the tests ------------------------------------------------------------------------------------


def test_killed_and_resumed_training_equals_the_uninterrupted_one(tmp_path: pathlib.Path) -> None:
    # The second save waits for the first: so there is one to resume from.
    last = random.SystemRandom().randrange(2 * SAVE_EVERY + 1, STEPS - 2)
    with contextlib.ExitStack() as stack:
        environment = {**os.environ, "PYTHONPATH": PATH}

        def start(seed: int, run: str, log: str) -> subprocess.Popen[str]:
            """Not forked, as the killed one is: so each of the three has a hash seed of its own."""
            command = [sys.executable, "-W", "ignore", __file__, "train", str(seed), tmp_path / run, tmp_path / log]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        (tmp_path / "whole").mkdir()
        (tmp_path / "run").mkdir()
        whole = start(1, "whole", "whole.log")
        arguments, errors = (str(tmp_path / "run"), str(tmp_path / "killed.log")), tmp_path / "errors.log"
        with ForkedProcess(
            torch_server(), __file__, "doomed", "1", *arguments, log=errors, env=environment, pipes=True
        ) as killed:
            assert any(int(line) == last for line in killed.stdout), errors.read_text()
        resumed = start(2, "run", "resumed.log")
        for process in (whole, resumed):
            process.communicate(timeout=300)
            assert process.returncode == 0

    expected = read(tmp_path / "whole.log")
    assert [line[0] for line in expected[:-1]] == list(range(1, STEPS + 1))
    assert sorted(index for line in expected[:13] for index in line[2]) == list(range(SAMPLES))
    before, after = read(tmp_path / "killed.log"), read(tmp_path / "resumed.log")
    assert before == expected[: len(before)], f"killed at step {last}"
    first = after[0][0]
    assert 1 < first <= len(before) + 1, f"killed at step {last}"
    assert after == expected[first - 1 :], f"killed at step {last}"


def test_second_resume_from_the_same_checkpoint_is_equal(tmp_path: pathlib.Path) -> None:
    """In this process: a position and generators that are loaded over used ones."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5))
    loader = DataLoader(Noisy(), batch_sampler=ResumableSampler(Noisy(), batch_size=7, seed=4))
    state = {"data": DataPosition(loader), "random": RandomState()}

    def outputs() -> list[Any]:
        while state["data"].epoch < 2:
            for indices, features, _ in state["data"]:
                yield [indices.tolist(), model(features).tolist()]

    batches = outputs()
    for _ in range(3):
        next(batches)
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c"))
    rest = list(batches)
    for _ in range(2):
        dcp.load(state, storage_reader=CheckpointReader(tmp_path / "c"))
        assert list(outputs()) == rest


def drawn() -> list[float]:
    return torch.rand(4).tolist()


def save_ranks(root: pathlib.Path) -> None:
    torch.manual_seed(100 + dist.get_rank())
    sampler = ResumableSampler(30, batch_size=2, seed=6)
    for _ in range(3):
        sampler.advance()
    state = {"random": RandomState(), "data": sampler}
    dcp.save(state, storage_writer=CheckpointWriter(root / "c"))
    (root / f"drawn-{dist.get_rank()}").write_text(json.dumps(drawn()))


def test_ranks_have_separate_generators_and_one_position(tmp_path: pathlib.Path) -> None:
    """Saved by two real ranks, loaded as each of three would."""
    ranks.run(__file__, "save_ranks", 2, tmp_path)
    expected = [json.loads((tmp_path / f"drawn-{rank}").read_text()) for rank in range(2)]
    assert expected[0] != expected[1]
    planner = CheckpointLoadPlanner(allow_partial_load=True)
    taken: list[int] = []
    for rank in range(3):
        torch.manual_seed(200 + rank)
        if rank == 2:
            expected.append(torch.rand(4, generator=torch.Generator().manual_seed(202)).tolist())
        sampler = ResumableSampler(30, batch_size=2, rank=rank, world_size=3)
        state = {"random": RandomState(rank=rank), "data": sampler}
        dcp.load(state, storage_reader=CheckpointReader(tmp_path / "c"), planner=planner)
        assert drawn() == expected[rank]
        taken += [index for batch in sampler for index in batch]
    whole = [index for batch in ResumableSampler(30, batch_size=1, seed=6) for index in batch]
    assert sorted(taken) == sorted(whole[12:])


if __name__ == "__main__":
    if sys.argv[1] in ("train", "doomed"):
        run, log = map(pathlib.Path, sys.argv[3:])
        train(int(sys.argv[2]), run, log, is_doomed=sys.argv[1] == "doomed")
    else:
        ranks.main({"save_ranks": save_ranks})
