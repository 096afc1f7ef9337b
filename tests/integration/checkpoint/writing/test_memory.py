"""The memory of a save, in a process of its own: the limits of glibc belong to a whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import resource, sys
import torch
import torch.distributed.checkpoint as dcp
from millrace.checkpoint import CheckpointWriter

state = {"weights": torch.randn(24 << 20).bfloat16()}

def page_faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    writer = CheckpointWriter(sys.argv[1], thread_count=2, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

page_faults()
print(sum(page_faults() for _ in range(8)))
"""


def test_repeated_save_reuses_the_memory_of_encoded_chunks(tmp_path: Path) -> None:
    """The eight saves store 64,000 pages, of which 17,000 and more would be new ones."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 3000
