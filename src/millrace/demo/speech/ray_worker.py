"""What Ray Train runs in every worker process: the training loop, with its batches from Ray Data."""

from __future__ import annotations

from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from millrace.demo.speech.job import SpeechJob, be_quiet
from millrace.demo.speech.ray_data import RayFeed
from millrace.demo.speech.training import Training


def train_loop(config: dict[str, Any]) -> None:
    """Train one worker's share. `config["job"]` is a `SpeechJob`, `config["family"]` its `Family`."""
    job: SpeechJob = config["job"]
    be_quiet()
    torch.set_num_threads(job.settings.threads_per_worker)
    family = config["family"]
    training = Training(
        job,
        family,
        RayFeed(family),
        device=ray.train.torch.get_device(),
        node=ray.util.get_node_ip_address(),
    )
    training.run()
