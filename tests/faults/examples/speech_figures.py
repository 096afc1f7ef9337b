"""What the loss of a node costs a fine-tune.

As root: `PYTHONPATH=examples/speech python -m tests.faults.examples.speech_figures`.

The sample clips and the small model with its defaults, two workers on two machines; then the same with one machine
killed in the middle.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from tests.faults.examples.speech_cluster import Job, SpeechCluster
from tests.support.machines.rays import ENVIRONMENT


def reported(name: str, job: Job, seconds: float) -> None:
    last, digests = job.epochs()[-1], {epoch.clips_digest for epoch in job.epochs()}
    end = job.events("end")[0]
    print(
        f"{name}: dev CER by epoch:",
        *(f"{epoch.dev_cer:.1%} ({epoch.workers[0].steps} steps)" for epoch in job.epochs()),
    )
    print(
        f"{name}: dev CER {last.dev_cer:.1%}, test CER {end['test_cer']:.1%} (known speakers "
        f"{end['test_cer_known_speakers']:.1%}, held-out {end['test_cer_held_out_speakers']:.1%}), last epoch's loss "
        f"{last.train_loss:.3f}, {len(digests)} digest(s) in {len(job.epochs())} epochs, job {seconds:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kill-after", type=int, default=4, help="the machine is killed when this epoch has its checkpoint"
    )
    given, options = parser.parse_known_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="millrace-") as directory, SpeechCluster(Path(directory)) as cluster:
        for name in ("undisturbed", "node-killed"):
            began = time.monotonic()
            job = cluster.submit(name, *options)
            if name == "node-killed":
                job.wait_for_checkpoint(given.kill_after)
                killed = time.time()
                cluster.lose(cluster.workers[0])
                job.wait_for(lambda job=job: len(job.events("start")) > 1, "the training does not start again")
                start = job.events("start")[1]
                print(
                    f"restored epoch {start['resumed_after']}, {start['time'] - killed:.0f} s after the kill",
                    flush=True,
                )
            job.wait_for_end()
            reported(name, job, time.monotonic() - began)


if __name__ == "__main__":
    main()
