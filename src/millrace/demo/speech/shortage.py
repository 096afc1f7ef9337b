"""What there is to tell of a cluster before a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.demo.speech.settings import SpeechSettings


def shortage(settings: SpeechSettings, resources: Mapping[str, float]) -> str | None:
    """What to tell of a cluster with `resources` (as `ray.cluster_resources()` has them) before a run; None if all is well.

    A run that lacks something waits: an autoscaler may bring it, or somebody who starts nodes.
    """
    workers = settings.min_workers or settings.num_workers
    needed = {"CPU": workers * settings.cpus_per_worker, "GPU": workers if settings.use_gpu else 0}
    there = {name: int(resources.get(name, 0)) for name in needed}
    short = [name for name in needed if there[name] < needed[name]]
    if short:
        has = " and ".join(f"{there[name]} of {_count(needed[name], name)}" for name in short)
        way_out = " (--cpu trains without)" if "GPU" in short else ""
        return f"the cluster has {has} that this run needs: it waits for nodes{way_out}"
    if there["GPU"] and not settings.use_gpu:
        return f"the cluster has {_count(there['GPU'], 'GPU')}, which this run leaves alone (--gpu uses them)"
    if there["CPU"] == needed["CPU"]:
        return (
            f"the training takes all of the cluster's {_count(there['CPU'], 'CPU')}: decoding has to share them, and is "
            "slower for it"
        )
    return None


def _count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
