"""A whole run, cut short: real Ray, a killed worker, checkpoints by Millrace's writer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("transformers")

RUN = """
import json, os, sys
import pyarrow.fs
from millrace.demo.speech.run import run_speech
from millrace.demo.speech.settings import SpeechSettings
from millrace.demo.speech_data import write_common_voice

if __name__ == "__main__":
    base = sys.argv[1]
    write_common_voice(__import__("pathlib").Path(base, "cv"), limits={"train": 48, "dev": 8, "test": 12})
    settings = SpeechSettings(data_url=f"{base}/cv", run_url=f"{base}/run").quick()
    lines = []
    result = run_speech(settings, pyarrow.fs.LocalFileSystem(), progress=lines.append)
    told = {
        "lines": lines,
        "epochs": [[epoch.epoch, epoch.attempt, epoch.clips] for epoch in result.epochs],
        "restarts": result.restarts,
        "recovery_seconds": result.recovery_seconds,
        "smaller": all(epoch.checkpoint_bytes < epoch.raw_bytes for epoch in result.epochs),
        "metrics": result.metrics,
    }
    print("RESULT " + json.dumps(told))
"""


@pytest.mark.slow
def test_a_quick_run_resumes_after_its_worker_was_killed(tmp_path: Path) -> None:
    # In a process of its own: what Ray is told about privacy counts only if it comes before Ray's import.
    script = tmp_path / "run.py"
    script.write_text(RUN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.rpartition("RESULT ")[2])

    # Killed in the middle of the second epoch, which the second attempt does again, whole.
    assert told["epochs"] == [[1, 0, 48], [2, 1, 48], [3, 1, 48]]
    assert told["restarts"] == 1
    assert told["recovery_seconds"] > 0
    assert told["smaller"]
    assert [line.split()[0] for line in told["lines"]] == [
        "starting", "training", "epoch", "killed", "resumed", "epoch", "epoch",
    ]  # fmt: skip

    run = tmp_path / "run"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["epoch-001", "epoch-002", "epoch-003"]
    assert {"config.json", "model.safetensors", "vocab.json"} <= {path.name for path in (run / "model").iterdir()}
    assert told["metrics"]["test_clips"] == 12
    assert 0 < told["metrics"]["test_clips_held_out"] < 12
    assert "Traceback" not in done.stderr
