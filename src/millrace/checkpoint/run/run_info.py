"""Descriptions of a run's checkpoints, which retention decides by. Pure; no torch, no I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from millrace.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from millrace.checkpoint.format.tables import NO_BASE, restore_bytes

SIBLING = "../"
"""Prefix of the names of data files in the directory of another checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint of a run. Sizes in bytes.

    `created` is in Unix seconds, by the writer's clock; `published` is the time of the manifest, by the storage's clock.
    `stored_bytes` counts its own files in its own directory, manifest included; `restore_bytes` all that a whole restore
    reads, in any directory. `bases` are the directories whose files it names, `files` these names as in the manifest
    (`../step-.../data-...` for a file of another checkpoint). `full` is the directory of the full save that the next delta
    may be made against, `after` the checkpoint that was the newest when it was saved, and `after_file` a data file of that
    one; None if the manifest does not contain it. `user` are the caller's values.

    For an incomplete checkpoint only the sizes and times of its files are known, and `kind` is None. A complete one whose
    step was saved again later is `superseded`.
    """

    name: str
    url: str
    step: int
    revision: int
    complete: bool
    created: float
    raw_bytes: int
    stored_bytes: int
    restore_bytes: int
    kind: Literal["full", "delta"] | None
    bases: frozenset[str] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    files: frozenset[str] = frozenset()
    superseded: bool = False
    full: str | None = None
    after: str | None = None
    after_file: str | None = None
    published: float = 0.0


def info_of_manifest(
    manifest: Manifest, manifest_bytes: int, *, name: str, url: str, step: int, revision: int, published: float
) -> CheckpointInfo:
    """Describe a manifest of `manifest_bytes` in the directory `name`.

    A checkpoint without a record of its run, because no manager saved it, is described by its files and chunks.
    """
    record = manifest.user.get("run")
    managed = isinstance(record, Mapping)
    record = record if isinstance(record, Mapping) else {}
    user = manifest.user.get("user", {}) if managed else manifest.user
    siblings = {file.name.split("/")[1] for file in manifest.files if file.name.startswith(SIBLING)} - {name}
    full, after, after_file = record.get("full"), record.get("after"), record.get("after_file")
    return CheckpointInfo(
        name=name,
        url=url,
        step=step,
        revision=revision,
        complete=True,
        created=manifest.created,
        raw_bytes=int(manifest.items["nbytes"].sum()),
        stored_bytes=manifest_bytes + sum(file.size for file in manifest.own_files),
        restore_bytes=manifest_bytes + _chunk_bytes(manifest),
        kind="delta" if siblings or (manifest.chunks["base"] != NO_BASE).any() else "full",
        bases=frozenset(siblings),
        metrics=_metrics(record.get("metrics")),
        user=user if isinstance(user, Mapping) else {},
        files=frozenset(file.name for file in manifest.files),
        full=full if isinstance(full, str) else None,
        after=after if isinstance(after, str) and after else None,
        after_file=after_file if isinstance(after_file, str) and after_file else None,
        published=published,
    )


def directory_of(file: str, checkpoint: str) -> tuple[str, str]:
    """The directory in the run, and the name there, of a data file that the manifest of `checkpoint` names."""
    if not file.startswith(SIBLING):
        return checkpoint, file
    directory, _, name = file.removeprefix(SIBLING).partition("/")
    return directory, name


def paths_of(info: CheckpointInfo) -> frozenset[str]:
    """All files that this checkpoint needs, its manifest included, as paths in the run's directory."""
    named = (directory_of(file, info.name) for file in info.files)
    return frozenset({f"{info.name}/{MANIFEST_NAME}", *(f"{directory}/{file}" for directory, file in named)})


def _chunk_bytes(manifest: Manifest) -> int:
    """The stored bytes of all chunks. A chunk that several rows refer to is counted once."""
    # A manifest from any source may name a file twice.
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    file = np.array([numbers[file.name] for file in manifest.files], dtype=np.uint32)
    return restore_bytes(manifest.chunks, file[manifest.chunks["file"]])


def _metrics(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        return {}
    figures: dict[str, float] = {}
    for key, value in found.items():
        if isinstance(value, int | float):
            with contextlib.suppress(OverflowError):  # an integer beyond all floats, which only other writers store
                figures[str(key)] = float(value)
    return figures
