"""Weights that one job publishes and others follow: `WeightPublisher` and `WeightFollower`.

A publication is a checkpoint of a run: `CheckpointManager` saves it, mostly as deltas to the version before, and removes old
ones. A follower may also follow the run of a training that saves with a `CheckpointManager` of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from millrace.checkpoint.arguments import (
    ReadThroughMode,
    classes,
    mapping,
    path_text,
    read_through_mode,
    thread_number,
    whole_number,
)
from millrace.checkpoint.codec.registry import Compression
from millrace.checkpoint.reading.updates import KeptChunks, UpdatingReader
from millrace.checkpoint.run.manager import CheckpointManager
from millrace.checkpoint.run.ranks import Ranks
from millrace.checkpoint.run.restoring import restore_into
from millrace.checkpoint.run.run_layout import MAX_STEP, ListedCheckpoint, open_run
from millrace.checkpoint.run.saving import SaveResult
from millrace.checkpoint.run.timeline import timeline
from millrace.config import absolute_path, parse_seconds
from millrace.errors import ChangedError, CheckpointNotFoundError, DamagedError, MissingError, UsageError

# A full save costs each follower a read of all weights, and limits the number of files that a new follower reads.
_FULL_EVERY = 32
# Attempts of an update while the version that it reads is removed.
_ATTEMPTS = 5
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.05, 2.0
# Ranks wait for the first one no longer than this in one collective call.
_WAIT_SECONDS = 60.0


class WeightPublisher:
    """Publishes versions of a model's weights for any number of `WeightFollower`s:

        publisher = WeightPublisher("s3://bucket/policy", keep=4)
        publisher.publish(version, model.state_dict())

    A version is complete and durable when `publish` returns, and followers never see a part of it. If the publisher dies,
    the last complete version remains. One publisher writes to a URL at a time: a new one takes over from a dead one.

    - `keep`: how many of the newest versions stay, with the files that they need. A follower that is slower than `keep`
      publications begins again with a newer one.
    - `full_every`: at least every n-th version is stored in full; the others are differences to the version before.
    - `base_memory`, `compression`, `thread_count`, `target_options`, `trusted_types`, `timeout`: as in `CheckpointManager`.
      The last version stays in host memory, as the base of the next one.

    Where `torch.distributed` is initialised, every rank makes the same calls, and publishes its part of sharded weights. For
    one thread; not picklable.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int = 4,
        full_every: int = _FULL_EVERY,
        base_memory: int | None = None,
        compression: Compression = "typed",
        thread_count: int | None = None,
        target_options: Mapping[str, Any] | None = None,
        trusted_types: Sequence[type] = (),
        timeout: str | float | None = None,
    ) -> None:
        self._run = CheckpointManager(
            url,
            keep=whole_number("keep", keep, least=1),
            full_every=full_every,
            independent=False,
            base_memory=base_memory,
            compression=compression,
            thread_count=thread_count,
            target_options=target_options,
            trusted_types=trusted_types,
            timeout=timeout,
        )

    def __repr__(self) -> str:
        return f"WeightPublisher({self._run.url!r})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(f"{self!r} cannot be pickled or copied", next_step="create one in the process that uses it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.__exit__(exc_type, exc, trace)

    def newest(self) -> int | None:
        """The newest published version; None before the first one. A restarted publisher continues after it."""
        return self._run.latest()

    def publish(self, version: int, weights: Mapping[str, Any]) -> SaveResult:
        """Publish `weights` (a dict of tensors, a state dict, or a dict of both and of modules) as `version`.

        Returns when the version is durable and visible. Versions increase. Raises `UsageError` for a version that is not
        above the newest one, `RunTakenError` when another publisher has taken over, and the errors of a save. After an
        error the version is not published.
        """
        version = whole_number("version", version, least=0)
        newest = self._run.latest()
        if newest is not None and version <= newest:
            raise UsageError(
                f"version {version} of {self._run.url} is not above version {newest}, which is published",
                next_step=f"publish version {newest + 1} or above",
            )
        if version > MAX_STEP:
            raise UsageError(f"version {version} has more than twelve digits", next_step="count versions from 0")
        return self._run.save(version, weights)

    def close(self) -> None:
        """Release the URL for another publisher, and the memory of the last version. Idempotent."""
        self._run.close()


class WeightFollower:
    """Brings tensors to the newest version of a `WeightPublisher`, in place:

        follower = WeightFollower("s3://bucket/policy")
        version = follower.update(weights)                      # the first time this reads all of them
        while True:
            version = follower.wait(newer_than=version)
            version = follower.update(weights)                  # reads the changed chunks

    An update reads the chunks that differ from the bytes in the tensors, and of these only the deltas since the tensors'
    version where the publisher stored deltas. Everything is read and verified before the first tensor changes. So after an
    error the tensors are as before, and after an update all are of one version. Tensors that were modified otherwise are
    detected and brought to the version, too.

    The tensors may have another sharding (`DTensor`), dtype or device than the published ones, and may be a part of them.
    The follower keeps a host copy of the chunks that such tensors do not hold bit for bit, as the base of the next update.
    During an update it needs host memory for the decoded chunks that it reads.

    - `target_options`, `thread_count`, `trusted_types`: as in `CheckpointReader`.
    - `read_through`: reads through the cache of the cluster, as in `CheckpointManager`. Then each byte of a version leaves
      the storage once for all followers.

    Where `torch.distributed` is initialised, every rank makes the same calls: all ranks get the same version or none does.
    For one thread; not picklable.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        thread_count: int | None = None,
        target_options: Mapping[str, Any] | None = None,
        trusted_types: Sequence[type] = (),
        read_through: ReadThroughMode = "auto",
    ) -> None:
        path = path_text("url", url)
        # Absolute: the process may change its directory before an update.
        self._path = (path if "://" in path else absolute_path(path)).rstrip("/")
        self._options = {
            "target_options": mapping("target_options", target_options),
            "trusted_types": classes("trusted_types", trusted_types),
            "thread_count": thread_number("thread_count", thread_count),
            "read_through": read_through_mode(read_through),
        }
        self._run = open_run(url, target_options)
        self._ranks = Ranks()
        self._kept: KeptChunks = {}

    def __repr__(self) -> str:
        return f"WeightFollower({self._run.url!r})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(f"{self!r} cannot be pickled or copied", next_step="create one in the process that uses it")

    def newest(self) -> int | None:
        """The newest version; None if there is none. One listing."""
        found = self._ranks.run_on_first(self._find)
        return None if found is None else found.step

    def wait(self, *, newer_than: int | None = None, timeout: str | float | None = None) -> int | None:
        """Wait for a version above `newer_than` (None: for any); returns the newest one, or None after `timeout`.

        `timeout` is in seconds, or a time such as `"2min"`; None waits without a limit. Lists the publications every two
        seconds, and more often at first. Raises the errors of the storage.
        """
        seconds = None if timeout is None else 0.0 if timeout == 0 else parse_seconds(timeout, option="timeout")
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            newest, ended = self._ranks.run_on_first(lambda: self._poll(newer_than, deadline))
            if newest is not None or ended:
                return newest

    def update(self, weights: MutableMapping[str, Any]) -> int:
        """Bring `weights` to the newest version, and return it.

        `weights` is a dict as it was published, or with some of its keys. Tensors are updated in place; plain values are
        replaced; modules load theirs, and may lack some of the published keys. Use no tensor before this returns.

        Raises `CheckpointNotFoundError` before the first publication, `MissingKeyError` for keys that are not published,
        `StateMismatchError` for other shapes, and the errors of a load. Then the tensors are unchanged. The exception is an
        error of a device or of a tensor subclass while the verified values are copied to it.
        """
        if not isinstance(weights, dict):
            raise UsageError(f"the weights are a {type(weights).__name__}", next_step="give a dict of tensors")
        found = self._ranks.run_on_first(self._existing)
        for attempt in range(_ATTEMPTS):
            try:
                self._load(weights, found)
            except (MissingError, ChangedError, DamagedError):
                newer = self._ranks.run_on_first(self._existing)
                # A version that was removed while it was read is not an error if there is a newer one.
                if newer == found or attempt == _ATTEMPTS - 1:
                    raise
                found = newer
            else:
                break
        return found.step

    def close(self) -> None:
        """Release the kept chunks and the process group. Idempotent."""
        self._kept = {}
        self._ranks.close()

    # --- inside -----------------------------------------------------------------------------------

    def _find(self) -> ListedCheckpoint | None:
        complete = timeline(each for each in self._run.scan() if each.complete)
        return complete[-1] if complete else None

    def _existing(self) -> ListedCheckpoint:
        found = self._find()
        if found is None:
            raise CheckpointNotFoundError(
                f"nothing is published in {self._run.url}", next_step="wait() for the first version, or check the URL"
            )
        return found

    def _poll(self, newer_than: int | None, deadline: float | None) -> tuple[int | None, bool]:
        """The newest version if it is above `newer_than`, and whether the deadline has passed. Returns within a minute."""
        pause, until = _FIRST_POLL_SECONDS, time.monotonic() + _WAIT_SECONDS
        while True:
            found = self._find()
            if found is not None and (newer_than is None or found.step > newer_than):
                return found.step, False
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return None, True
            if now >= until:
                return None, False
            time.sleep(min(pause, until - now, *(() if deadline is None else (deadline - now,))))
            pause = min(2 * pause, _LAST_POLL_SECONDS)

    def _load(self, weights: dict[str, Any], found: ListedCheckpoint) -> None:
        reader = UpdatingReader(
            f"{self._path}/{found.name}", kept=self._kept, agree=self._ranks.raise_if_any_failed, **self._options
        )
        # Only keys that the weights have, also inside of dicts and modules.
        restore_into(weights, reader, self._ranks, keys=("*",), partial_modules=True)
        if reader.update is not None:
            self._kept = reader.update.kept
