"""`kill -9` of a pruning process, repeatedly at random moments: no kept checkpoint is lost, and no file is left."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.support.runs import add_checkpoint, assert_whole, complete, is_whole, local_run, own_paths, tree
from tests.support.waiting import wait_until

from millrace.checkpoint.format.manifest import MANIFEST_NAME
from millrace.checkpoint.run import pruning
from millrace.checkpoint.run.run_info import paths_of
from millrace.checkpoint.run.run_layout import open_run

# Exactly what the policy keeps; test_independence.py is about the one that stays besides.
prune = functools.partial(pruning.prune, independent=False)

ROUNDS = 25
CHECKPOINTS = 16
# A pruning of these checkpoints changes the directory about as often.
CHANGES = 75
KEEP = "last=2,every=5"


def build(run) -> None:
    """Chains through siblings: a full save, then deltas that name its files and one of each delta in between."""
    chain: list[str] = []
    for step in range(1, CHECKPOINTS + 1):
        if step % 4 == 1:
            chain = own_paths(add_checkpoint(run, step, files=3))[:2]
        else:
            chain.append(own_paths(add_checkpoint(run, step, files=2, siblings=chain))[0])


# --- the process that dies (this file is its own program) -----------------------------------------


def child(root: str, seed: int) -> int:
    """Prune in a fork of this process, which kills itself before a random change of the directory; returns the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            left = random.Random(seed).randrange(CHANGES)

            def counted(call):
                def counting(*args, **options):
                    nonlocal left
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **options)

                return counting

            for name in ("unlink", "link", "rmdir", "fsync"):
                setattr(os, name, counted(getattr(os, name)))
            prune(open_run(root), KEEP)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main(root: str) -> None:
    seed = 0
    while sys.stdin.readline():
        seed += 1
        print(child(root, seed), flush=True)


# --- the test -------------------------------------------------------------------------------------


@pytest.fixture
def killer(tmp_path):
    program = (
        f"import importlib.util as u; s = u.spec_from_file_location('kills', {__file__!r});"
        f"m = u.module_from_spec(s); s.loader.exec_module(m); m.main({str(tmp_path / 'run')!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_killed_pruning_loses_no_kept_checkpoint(killer, tmp_path):
    run = local_run(tmp_path / "run")
    ends = []
    for number in range(ROUNDS):
        build(run)
        kept = set(prune(run, KEEP, dry_run=True).kept)
        # One in a row, two, or three.
        for _ in range(1 + number % 3):
            killer.stdin.write("\n")
            killer.stdin.flush()
            ends.append(int(killer.stdout.readline()))
            assert kept <= set(complete(run))
            assert_whole(run)
        # The next one removes only the leftovers of the killed ones.
        assert set(prune(run, KEEP).kept) == kept
        infos = run.describe_all(found for found in run.scan() if found.complete).values()
        assert {info.name for info in infos} == kept
        there = {path for path in tree(tmp_path / "run") if not path.startswith(".pruning-")}
        assert there == frozenset().union(*(paths_of(info) for info in infos))
        for found in run.scan():
            run.remove(found.name, [file.name for file in found.files])
    # Some were killed, and some had little to do and finished.
    assert ends.count(signal.SIGKILL) > ROUNDS // 2
    assert 0 in ends


def test_concurrent_prunings_with_different_policies_leave_no_manifest_without_data(tmp_path):
    """A pruning removes its checkpoints, and at no moment does a manifest exist without its data."""
    place = tmp_path / "run"
    build(local_run(place))
    saved = threading.Event()
    broken: list[str] = []
    rounds = dict.fromkeys(("last=1", "last=4,every=7", "reading"), 0)

    def pruning(policy: str) -> None:
        while not saved.is_set():
            prune(local_run(place), policy)
            rounds[policy] += 1

    def reading() -> None:
        run = local_run(place)
        while not saved.is_set():
            for name in complete(run):
                if not is_whole(run.checkpoint(name)) and is_there(run, name):
                    broken.append(name)
            rounds["reading"] += 1

    def wait_for_a_round_of_all() -> None:
        before = dict(rounds)
        wait_until(lambda: all(rounds[name] > before[name] for name in rounds) or any(map(Future.done, others)))

    def saving() -> None:
        run = local_run(place)
        full = add_checkpoint(run, CHECKPOINTS + 1)
        for step in range(CHECKPOINTS + 2, CHECKPOINTS + 42):
            if step == CHECKPOINTS + 22:
                wait_for_a_round_of_all()
            newest = [found for found in run.scan() if found.complete][-1]
            siblings = {*own_paths(full), *own_paths(newest)}
            added = add_checkpoint(run, step, siblings=sorted(siblings), full=full.name)
            full = add_checkpoint(run, step, revision=1) if step % 10 == 0 else full
            assert is_whole(run.checkpoint(added.name)) or not is_there(run, added.name)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(pruning, policy) for policy in ("last=1", "last=4,every=7")] + [pool.submit(reading)]
        try:
            saving()
        finally:
            saved.set()
        for other in others:
            other.result()
    assert broken == []
    assert_whole(local_run(place))
    assert complete(local_run(place))


def is_there(run, name: str) -> bool:
    return MANIFEST_NAME in run.checkpoint(name).names()
