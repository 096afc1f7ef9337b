"""What one checkpoint of a run is, in short: the facts that retention decides by. Pure; no torch, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from millrace.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from millrace.checkpoint.format.tables import NO_BASE

SIBLING = "../"
"""How the name of a data file begins that lies in the directory of another checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint of a run. Sizes in bytes.

    `created` is in Unix seconds, by the writer's clock; `published` is when the manifest was written, by the storage's.
    `stored_bytes` counts what lies in its own directory and is its own, manifest included; `restore_bytes` what a whole
    read fetches, wherever that lies. `bases` are the directories whose files it names, `files` these names as they
    are in the manifest (`../step-.../data-...` for a file of another checkpoint). `full` is the directory of the full
    save that the next delta may be made against; None where the manifest does not say. `user` is the caller's own.

    Of an incomplete one only sizes and times of its files are known, and `kind` is None. A complete one whose step was
    saved again later is `superseded`.
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
    published: float = 0.0


def info_of_manifest(
    manifest: Manifest, manifest_bytes: int, *, name: str, url: str, step: int, revision: int, published: float
) -> CheckpointInfo:
    """Sum up a manifest that is `manifest_bytes` long in the directory `name`.

    A checkpoint that no manager saved has no record of the run; then it is told from its files and chunks.
    """
    record = manifest.user.get("run")
    managed = isinstance(record, Mapping)
    record = record if isinstance(record, Mapping) else {}
    user = manifest.user.get("user", {}) if managed else manifest.user
    siblings = {file.name.split("/")[1] for file in manifest.files if file.name.startswith(SIBLING)} - {name}
    full = record.get("full")
    return CheckpointInfo(
        name=name,
        url=url,
        step=step,
        revision=revision,
        complete=True,
        created=manifest.created,
        raw_bytes=int(manifest.items["nbytes"].sum()),
        stored_bytes=manifest_bytes + sum(f.size for f in manifest.files if not f.name.startswith(SIBLING)),
        restore_bytes=manifest_bytes + _chunk_bytes(manifest),
        kind="delta" if siblings or (manifest.chunks["base"] != NO_BASE).any() else "full",
        bases=frozenset(siblings),
        metrics=_metrics(record.get("metrics")),
        user=user if isinstance(user, Mapping) else {},
        files=frozenset(file.name for file in manifest.files),
        full=full if isinstance(full, str) else None,
        published=published,
    )


def directory_of(file: str, checkpoint: str) -> tuple[str, str]:
    """Where the data file lies that the manifest of `checkpoint` names so: its directory in the run, and its name there."""
    if not file.startswith(SIBLING):
        return checkpoint, file
    directory, _, name = file.removeprefix(SIBLING).partition("/")
    return directory, name


def paths_of(info: CheckpointInfo) -> frozenset[str]:
    """Everything that must be there for this checkpoint to be whole, as paths in the run's directory."""
    named = (directory_of(file, info.name) for file in info.files)
    return frozenset({f"{info.name}/{MANIFEST_NAME}", *(f"{directory}/{file}" for directory, file in named)})


def _chunk_bytes(manifest: Manifest) -> int:
    """The stored bytes of every chunk, a chunk that several rows point to counted once."""
    if not len(manifest.chunks):
        return 0
    # Unlike `chains.restore_bytes`, which is of one writer, for a manifest from anywhere: it may name a file twice.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(file.name for file in manifest.files))}
    file = np.array([numbers[file.name] for file in manifest.files], dtype=np.uint32)[manifest.chunks["file"]]
    offset = manifest.chunks["offset"]
    order = np.lexsort((offset, file))
    file, offset = file[order], offset[order]
    first = np.concatenate([[True], (file[1:] != file[:-1]) | (offset[1:] != offset[:-1])])
    return int(manifest.chunks["stored_bytes"][order][first].sum(dtype=np.uint64))


def _metrics(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        return {}
    return {str(key): float(value) for key, value in found.items() if isinstance(value, int | float)}
