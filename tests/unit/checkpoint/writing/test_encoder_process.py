"""Saving through the encoder process: the same bytes as by threads, and threads where it does not work."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from millrace.checkpoint import CheckpointWriter
from millrace.checkpoint.run.driving import save
from millrace.checkpoint.run.ranks import Ranks
from millrace.checkpoint.state.arena import Arena, regions
from millrace.checkpoint.state.staging import StateStager
from millrace.checkpoint.writing.encoder_process import EncoderProcess, pieces_in


@pytest.fixture
def process():
    it = EncoderProcess(2)
    yield it
    it.close()


def state(seed=0):
    """Large and small tensors, of several kinds; some that no codec shrinks; an object."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(1_300_000, generator=generator) * 0.02
    return {
        "fp32": numbers,
        "bf16": numbers.to(torch.bfloat16),
        "noise": torch.randint(0, 256, (700_001,), dtype=torch.uint8, generator=generator),
        "frozen": torch.arange(600_000),
        "zeros": torch.zeros(400_000, dtype=torch.float64),
        "empty": torch.zeros(0),
        "odd": torch.ones(3, dtype=torch.int16),
        "note": {"epoch": 3, "name": "run"},
        **{f"bias.{number}": numbers[number * 7 : number * 7 + 40 + number % 5].clone() for number in range(3000)},
    }


def changed(before):
    """The state after a small step: most floats differ a little, some tensors not at all, one in all its bits."""
    after = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in before.items()}
    for key in {"fp32", "zeros"} & after.keys():
        after[key] += 1e-6
    after["bf16"].view(torch.int16)[::3] += 1
    after["bias.7"] += 1
    return after


def write(folder, staged, process, base=None, compression="typed"):
    """Save a staged state; returns the bytes of all data files, the stats and the base for a next save."""
    writer = CheckpointWriter(folder, thread_count=2, compression=compression, base=base, keep_base=True)
    writer._process = process
    save(staged.state, writer, Ranks())
    data = b"".join(file.read_bytes() for file in sorted(Path(folder).glob("data-*")))
    return data, writer.stats, writer.written_base(Path(folder).name)


def figures(stats):
    return stats.raw_bytes, stats.stored_bytes, stats.chunks_full, stats.chunks_delta, stats.chunks_referenced


@pytest.mark.parametrize("compression", ["typed", "max", "none"])
def test_encoder_process_writes_the_bytes_of_threads(tmp_path, process, events, compression):
    stager = StateStager(shared=True)
    first = state()
    if compression == "max":  # which takes its time
        del first["fp32"], first["zeros"]
    one, other = stager.stage(first), stager.stage(changed(first))
    by_threads, by_process = tmp_path / "threads", tmp_path / "process"
    data, stats, base = write(by_threads / "step-1", one, None, compression=compression)
    same, same_stats, same_base = write(by_process / "step-1", one, process, compression=compression)
    assert process.pid is not None
    assert (same, figures(same_stats)) == (data, figures(stats))
    data, stats, _ = write(by_threads / "step-2", other, None, base, compression)
    same, same_stats, _ = write(by_process / "step-2", other, process, same_base, compression)
    assert (same, figures(same_stats)) == (data, figures(stats))
    assert same_stats.chunks_referenced > 0
    assert (same_stats.chunks_delta > 0) == (compression != "none")
    assert not events


def test_chunks_are_encoded_by_the_process(tmp_path, process, monkeypatch):
    staged = StateStager(shared=True).stage(
        {"w": torch.randn(2_000_000), **{f"b{n}": torch.randn(100) for n in range(500)}}
    )
    # Whatever a thread would encode would be an error.
    monkeypatch.setattr("millrace.checkpoint.writing.encoding.form_of", None)
    _, stats, _ = write(tmp_path / "a", staged, process)
    assert stats.raw_bytes == 2_000_000 * 4 + 500 * 400


def test_changed_base_is_detected(tmp_path, process, events):
    stager = StateStager(shared=True)
    one = stager.stage({"w": torch.randn(400_000)})
    other = stager.stage({"w": one.state["w"] * 1.0001})
    _, _, base = write(tmp_path / "step-1", one, process)
    one.state["w"][5] = 7.0
    _, stats, _ = write(tmp_path / "step-2", other, process, base)
    # Two chunks were under way; the first is whose base is damaged.
    assert stats.chunks_full >= 1
    assert [event.name for event in events] == ["checkpoint.base.unreadable"]


def test_unshared_memory_is_encoded_by_threads(tmp_path, process):
    class Plain:
        def __init__(self, state):
            self.state = state

    first = state()
    assert write(tmp_path / "a", Plain(first), process)[0] == write(tmp_path / "b", Plain(first), None)[0]


def test_killed_encoder_is_replaced_and_finally_given_up(tmp_path, process, events):
    staged = StateStager(shared=True).stage({"w": torch.randn(600_000)})
    wanted, _, _ = write(tmp_path / "wanted", staged, None)
    pids = []
    for number in range(6):
        assert write(tmp_path / str(number), staged, process)[0] == wanted
        pids.append(process.pid)
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
    assert len({pid for pid in pids if pid is not None}) == 3
    assert pids[-1] is None
    assert {event.name for event in events} == {"checkpoint.encoder.lost"}


def test_encoder_that_cannot_start_emits_an_event(tmp_path, process, events, monkeypatch):
    staged = StateStager(shared=True).stage({"w": torch.randn(600_000)})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    data, _, _ = write(tmp_path / "a", staged, process)
    assert data == write(tmp_path / "b", staged, None)[0]
    assert [event.name for event in events] == ["checkpoint.encoder.start"]
    # One that ends at once.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert write(tmp_path / "c", staged, process)[0] == data
    assert events[-1].name == "checkpoint.encoder.lost"


def test_chunk_after_encoder_failure_is_encoded_by_threads(tmp_path, process, events, monkeypatch):
    staged = StateStager(shared=True).stage({"w": torch.randn(600_000)})
    # A kind that the child refuses.
    monkeypatch.setattr("millrace.checkpoint.writing.encoder_process.REQUEST", _Broken())
    assert write(tmp_path / "a", staged, process)[0] == write(tmp_path / "b", staged, None)[0]
    assert {event.name for event in events} == {"checkpoint.encoder.failed"}


class _Broken:
    def pack(self, *fields):
        from millrace.checkpoint.writing.encoder_protocol import REQUEST

        return REQUEST.pack(fields[0], 0x77, *fields[2:])


def test_failed_storage_leaves_no_chunk_in_the_encoder(tmp_path, process):
    class FullError(Exception):
        pass

    class Broken(CheckpointWriter):
        def _storage(self):
            storage = super()._storage()
            storage.open_writer = self._fails
            return storage

        def _fails(self, name):
            raise FullError

    stager = StateStager(shared=True)
    staged = stager.stage({"w": torch.randn(6_000_000)})
    writer = Broken(tmp_path / "a", thread_count=2)
    writer._process = process
    with pytest.raises(FullError):
        save(staged.state, writer, Ranks())
    assert write(tmp_path / "b", staged, process)[0] == write(tmp_path / "c", staged, None)[0]


def test_encoder_process_imports_no_torch():
    code = (
        "import sys, millrace.checkpoint.writing.encoder_main; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_shared_regions_are_released_with_their_tensors():
    arena = Arena(1 << 20, pinned=False, shared=True)
    region = arena.region
    tensor = arena.tensor(64, torch.float32, torch.Size([1000]))
    del arena
    gc.collect()
    assert region in regions()
    other = os.dup(region.descriptor)
    try:
        del tensor
        gc.collect()
        assert region not in regions()
        # The open descriptor no longer has memory.
        assert os.fstat(other).st_size == 0
    finally:
        os.close(other)


def test_pieces_are_in_one_region():
    one, other = Arena(4096, pinned=False, shared=True), Arena(4096, pinned=False, shared=True)
    here, there = one.region, other.region
    found = pieces_in(regions(), [here.address + 64, here.address], [32, 64])
    assert found.region == here
    assert found.offsets.tolist() == [64, 0]
    assert pieces_in(regions(), [here.address + 4000], [97]) is None
    assert pieces_in(regions(), [here.address, there.address], [1, 1]) is None
    assert pieces_in(regions(), [id(here)], [1]) is None


def test_dropped_manager_ends_its_encoder(tmp_path):
    process = EncoderProcess(1)
    assert process.begin()
    child = process.pid
    del process
    gc.collect()
    assert not Path(f"/proc/{child}").exists()


def test_encoder_has_low_priority_and_ignores_interrupts(process):
    assert process.begin()

    def ignores_interrupts() -> int:
        ignored = int(Path(f"/proc/{process.pid}/status").read_text().split("SigIgn:")[1].split()[0], 16)
        return ignored >> (signal.SIGINT - 1) & 1

    deadline = time.monotonic() + 120
    while os.getpriority(os.PRIO_PROCESS, process.pid) < 10 or not ignores_interrupts():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("failure", [None, "ENOSYS", "EPERM"])
def test_encoder_without_parent_ends_without_a_traceback(failure):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = "import errno, os, sys; from millrace.checkpoint.writing.encoder_main import main\n"
    if failure:  # as where a container forbids the call
        code += f"def refuse(pid): raise OSError(errno.{failure}, 'refused')\nos.pidfd_open = refuse\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.run(
            [sys.executable, "-c", f"{code}main(sys.argv[1:])", str(theirs.fileno()), str(gone.pid), "1", "0"],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=300,
            check=False,
        )
    assert (child.returncode, child.stderr) == (0, b"")


def test_encoder_that_cannot_watch_its_parent_ends_after_it():
    child = (
        "import errno, os, sys\n"
        "def refuse(pid): raise OSError(errno.EPERM, 'refused')\n"
        "os.pidfd_open = refuse\n"
        "from millrace.checkpoint.writing.encoder_main import main\n"
        "main(sys.argv[1:])\n"
    )
    middle = (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2], str(os.getpid()), '1', '0'],"
        " pass_fds=[int(sys.argv[2])])\n"
    )
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            parent = subprocess.run(
                [sys.executable, "-c", middle, child, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                capture_output=True,
                timeout=300,
                check=False,
            )
        assert (parent.returncode, parent.stderr) == (0, b"")
        # Its end of the socket closes when the child ends.
        ours.settimeout(120)
        assert ours.recv(1) == b""
