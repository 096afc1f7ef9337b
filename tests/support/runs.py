"""Runs of checkpoints for tests: manifests over small data files, with any bases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from millrace.checkpoint.format.manifest import MANIFEST_NAME, DataFile, Manifest, encode_manifest
from millrace.checkpoint.format.tables import chunk_table, item_table
from millrace.checkpoint.run import claims
from millrace.checkpoint.run.claims import Claim
from millrace.checkpoint.run.run_layout import ListedCheckpoint, Run, _ObjectPlace, checkpoint_name, open_run
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.object_storage import ObjectStorage
from millrace.errors import MissingError
from millrace.origin import Origin, open_origin

DAY = 24 * 3600.0


def local_run(path: Path) -> Run:
    return open_run(path, sync=False)


def object_run(path: Path, origin: Origin | None = None) -> Run:
    """A run in a directory that is treated as one in an object store."""
    origin = origin or open_origin("file")
    url = f"file://{path}"
    return Run(ObjectStorage(url, origin, str(path)), _ObjectPlace(url, origin, str(path)))


def data_name() -> str:
    return f"data-{uuid.uuid4().hex}-0-0.millrace"


def add_file(run: Run, directory: str, name: str, size: int = 100) -> None:
    storage = run.checkpoint(directory)
    storage.prepare()
    storage.publish(name, os.urandom(size), replace=True)


def add_checkpoint(
    run: Run,
    step: int,
    *,
    revision: int = 0,
    files: int = 1,
    siblings: Iterable[str] = (),
    metrics: Mapping[str, float] | None = None,
    full: str | None = None,
    created: float = 1e9,
    managed: bool = True,
    size: int = 100,
) -> ListedCheckpoint:
    """Save a checkpoint of own `files` that also names `siblings` (paths in the run); returns it as it is listed."""
    directory = checkpoint_name(step, revision)
    own = [DataFile(data_name(), size + number) for number in range(files)]
    for file in own:
        add_file(run, directory, file.name, file.size)
    others = [DataFile(f"../{path}", _size(run, path)) for path in siblings]
    record = {"step": step, "kind": "delta" if others else "full", "full": full, "metrics": dict(metrics or {})}
    manifest = Manifest(
        created=created,
        writer="a test",
        files=(*others, *own),
        tensors=(),
        blobs=(),
        items=item_table(),
        chunks=chunk_table(),
        user={"run": record, "user": {}} if managed else {"mine": 1},
        save_id=uuid.uuid4().hex,
    )
    storage = run.checkpoint(directory)
    storage.prepare()
    storage.publish(MANIFEST_NAME, encode_manifest(manifest), replace=True)
    return next(found for found in run.scan() if found.name == directory)


def _size(run: Run, path: str) -> int:
    directory, _, name = path.partition("/")
    return run.checkpoint(directory).stat(name).size


def own_paths(found: ListedCheckpoint) -> list[str]:
    """The data files of a checkpoint, as paths in the run."""
    return [f"{found.name}/{file.name}" for file in found.files if file.name != MANIFEST_NAME]


def complete(run: Run) -> list[str]:
    return [found.name for found in run.scan() if found.complete]


def is_whole(storage: CheckpointStorage) -> bool:
    """Whether all files that a manifest names exist, with the recorded length."""
    try:
        return all(storage.stat(file.name).size == file.size for file in read_manifest(storage).manifest.files)
    except MissingError:
        return False


def assert_whole(run: Run) -> None:
    """Every checkpoint that has a manifest has all of its files."""
    for name in complete(run):
        assert is_whole(run.checkpoint(name)), name


def tree(root: Path) -> dict[str, int]:
    """Every file below a directory, with its size, and empty directories (ending in a slash, size 0)."""
    found = {}
    for place, directories, files in os.walk(root):
        base = os.path.relpath(place, root)
        if not directories and not files:
            found[f"{base}/"] = 0
        for name in files:
            found[os.path.normpath(f"{base}/{name}")] = os.stat(os.path.join(place, name)).st_size
    return found


def age(root: Path, path: str, seconds: float) -> None:
    """Make a file that much older than it is."""
    target = root / path
    os.utime(target, (target.stat().st_mtime - seconds,) * 2)


def race_for_claims(url: str, options: Mapping[str, str] | None, turns: int, start: Barrier, results: Queue) -> None:
    """In a separate process: read the newest claim, and try to replace it like that of a dead one. Sends its numbers."""
    won = []
    run = open_run(url, options)
    for _ in range(turns):
        start.wait()
        newest = claims._newest(run)
        start.wait()
        claim = Claim._follow(run, newest)
        won.append(None if claim is None else claim.number)
        start.wait()
        if claim is not None:
            claim.check()
    results.put(won)


def name_of(step: int) -> str:
    """The directory of the first checkpoint of a step."""
    return f"step-{step:012d}"
