"""Reads of Ray Data that run on the nodes that have the data cached.

In Ray Data, a data source cannot place its tasks, but a whole read can have a preferred node. Therefore a near read is the
union of one read per node.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileSystem

from millrace.cluster.attach import link_for
from millrace.cluster.membership import NodeLink
from millrace.cluster.placement import Placement, stripe_count, stripe_span
from millrace.errors import DeniedError, MillraceError, UsageError
from millrace.filesystem import MillraceFileSystem
from millrace.filesystem.cluster_loading import start_everywhere
from millrace.filesystem.listing import describe_many
from millrace.origin import ObjectInfo
from millrace.ray.locations import millrace_of
from millrace.store.records import object_id

if TYPE_CHECKING:
    import ray.data

_log = logging.getLogger("millrace.ray")

_BY_RAY = ("auto", "ray")
_FILE_BYTES = 256 << 10
"""The cost of opening a file, in bytes that are read in the same time."""

_SHARED = ("override_num_blocks", "concurrency")
"""Options of the whole read that are divided among its parts."""

_SKIPPED = (".", "_")
"""Ray skips paths below a folder that begin with these."""


def homes(filesystem: FileSystem, paths: Iterable[str]) -> list[str | None]:
    """The id of the Ray node that owns each object, and has it on its disk after the first read.

    None if it is unknown: without a cluster, a Ray node, or the object. For an object of several stripes, the node with most
    of them. Needs one listing for every thousand keys, or none if they are cached. Raises `OriginUnavailableError` if the
    storage does not respond.
    """
    chosen = list(paths)
    fs = millrace_of(filesystem)
    found = None if fs is None else _Owners.of(fs)
    if fs is None or found is None:
        return [None] * len(chosen)
    infos = describe_many(fs, map(fs.key_of, chosen))
    return [None if info is None else found.home(info) for info in (infos.get(fs.key_of(path)) for path in chosen)]


def read_near(
    read: Callable[..., ray.data.Dataset],
    paths: str | Sequence[str],
    *,
    filesystem: FileSystem,
    then: Callable[[ray.data.Dataset], ray.data.Dataset] | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """`read(paths, filesystem=filesystem, **options)`, with read tasks on the nodes that own the files.

        ds = millrace.ray.read_near(ray.data.read_images, "s3://bucket/train", filesystem=fs, then=decoded)

    `read` is a function of Ray Data for files, or any function with the same arguments that passes on `ray_remote_args`. It
    is called once for each node that owns some of the files, and the data sets are united in the order of the nodes' ids.
    `then` is applied to each of them first: `map_batches` in it run on the same node (with `batch_size=None`, in the tasks
    that read). Steps after the union may run anywhere.

    The tasks of a busy or lost node run on other nodes, which only costs locality. `override_num_blocks` and `concurrency`
    are divided by the size of the files, at least one per node. Without a cluster, or on one node, this is the plain read.
    """
    for name in ("scheduling_strategy", "label_selector"):
        if options.get(name) or (options.get("ray_remote_args") or {}).get(name):
            raise UsageError(
                f"{name} conflicts with read_near, which places the tasks", next_step="call the read function itself"
            )
    fs = millrace_of(filesystem)
    chosen = [paths] if isinstance(paths, str) else list(paths)
    parts = None if fs is None else _parts(fs, chosen, ignore_missing=bool(options.get("ignore_missing_paths")))
    if fs is None or parts is None:
        return _after(then, read(paths, filesystem=filesystem, **options))
    options = {**options, "override_num_blocks": options.get("override_num_blocks") or _blocks(parts)}
    costs = [part.cost for part in parts]
    shares = {name: share_out(options[name], costs) for name in _SHARED if options.get(name)}
    datasets = []
    with _settings.of(fs):
        for place, part in enumerate(parts):
            named = {**(options.get("ray_remote_args") or {}), **_near(part.node)}
            given = {
                **options,
                "ray_remote_args": named or None,
                **{name: share[place] for name, share in shares.items()},
            }
            dataset = _after(then, read(part.paths, filesystem=filesystem, **given))
            _keep_near(dataset, named)
            datasets.append(dataset)
    return datasets[0].union(*datasets[1:]) if len(datasets) > 1 else datasets[0]


def share_out(total: int, costs: Sequence[int]) -> list[int]:
    """Divide `total` into whole shares proportional to `costs`, each at least 1 (so their sum may exceed `total`). Pure."""
    spare, whole = max(0, total - len(costs)), sum(costs)
    shares = [1 + spare * cost // whole for cost in costs]
    by_remainder = sorted(range(len(costs)), key=lambda place: -(spare * costs[place] % whole))
    for place in by_remainder[: max(0, total - sum(shares))]:
        shares[place] += 1
    return shares


@dataclass
class NodeShare:
    """The files to read near one node; None: anywhere."""

    node: str | None
    paths: list[str] = field(default_factory=list)
    nbytes: int = 0

    @property
    def cost(self) -> int:
        """The cost of reading it, in bytes."""
        return self.nbytes + _FILE_BYTES * len(self.paths)


def grouped(
    files: Iterable[tuple[str, ObjectInfo | None]], home: Callable[[ObjectInfo], str | None]
) -> list[NodeShare]:
    """Files grouped by their home nodes, in the order of the nodes' ids; those without one first. Pure except `home`."""
    parts: dict[str, NodeShare] = {}
    for path, info in files:
        node = None if info is None else home(info)
        part = parts.setdefault(node or "", NodeShare(node))
        part.paths.append(path)
        part.nbytes += 0 if info is None else info.size
    return [parts[node] for node in sorted(parts)]


def _parts(fs: MillraceFileSystem, paths: Sequence[str], *, ignore_missing: bool) -> list[NodeShare] | None:
    """The files of `paths`, grouped by home node; None if no file has one."""
    if fs._options.members == "none":
        return None
    import ray

    if not ray.is_initialized():
        # As the read itself does: a submitted job need not call `ray.init`.
        from ray._private.auto_init_hook import auto_init_ray

        auto_init_ray()
    # No tasks run on other nodes, such as a head node without CPUs.
    working = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
    owners = _Owners.of(fs, start=True) if len(working) > 1 else None
    if owners is None:
        return None

    def home(info: ObjectInfo) -> str | None:
        node = owners.home(info)
        return node if node in working else None

    parts = grouped(_files(fs, paths, ignore_missing=ignore_missing), home)
    return parts if any(part.node for part in parts) else None


def _files(
    fs: MillraceFileSystem, paths: Sequence[str], *, ignore_missing: bool
) -> Iterable[tuple[str, ObjectInfo | None]]:
    """The named files, and those below named folders, as Ray finds them; None instead of unknown metadata."""
    infos = describe_many(fs, map(fs.key_of, paths))
    for path in paths:
        info = infos.get(fs.key_of(path))
        if info is not None:
            yield path, info
            continue
        try:
            below = list(_below(fs, path))
        except DeniedError:  # read access without list access
            yield path, None
            continue
        yield from below
        if not below and not ignore_missing:
            yield path, None  # Ray raises its own error


def _below(fs: MillraceFileSystem, path: str) -> Iterable[tuple[str, ObjectInfo]]:
    start = len(fs.key_of(path))
    for page in fs.list_all(path):
        for info in page:
            if not info.key.endswith("/") and not info.key[start:].lstrip("/").startswith(_SKIPPED):
                yield fs.unstrip_protocol(info.key), info


@dataclass(frozen=True)
class _Owners:
    """The owners of objects, and their Ray nodes."""

    identity: str
    placement: Placement
    ray_nodes: Mapping[str, str]

    @classmethod
    def of(cls, fs: MillraceFileSystem, *, start: bool = False) -> _Owners | None:
        """By the newest view; None without a cluster. `start` starts nodes on Ray nodes without one."""
        if fs.origin.head_is_local:
            return None
        by_ray = fs._options.members in _BY_RAY
        try:
            link = link_for(fs._options, fs.origin)
            if link is None:
                return None
            if start and by_ray:
                start_everywhere(fs._options, link.views)
            placement = Placement(link.views.view(), replicas=link.replicas)
            return cls(fs.origin_identity, placement, _ray_nodes(fs, link, by_ray=by_ray))
        except MillraceError as error:
            if fs._options.members != "auto":
                raise
            # As the file system, which then reads without a cluster.
            _log.warning("cannot find the nodes near the files: %s", error)
            return None

    def home(self, info: ObjectInfo) -> str | None:
        """The Ray node that owns most of an object."""
        name = object_id(self.identity, info.key, info.version, info.size)
        owned: Counter[str] = Counter()
        for stripe in range(stripe_count(info.size)):
            order = self.placement.order(name, stripe)
            if order:
                start, stop = stripe_span(stripe, info.size)
                owned[order[0].id] += stop - start
        # Of equal ones, the first counted.
        return self.ray_nodes.get(owned.most_common(1)[0][0]) if owned else None


def _ray_nodes(fs: MillraceFileSystem, link: NodeLink, *, by_ray: bool) -> dict[str, str]:
    """The Ray nodes of the members, by member id."""
    if by_ray:
        from millrace.cluster.membership.ray import ray_nodes

        return ray_nodes(fs._options)
    import ray

    if not ray.is_initialized():
        return {}
    # Other members: by the machine's address, if only one Ray node has it.
    nodes = [(str(node["NodeManagerAddress"]), str(node["NodeID"])) for node in ray.nodes() if node["Alive"]]
    count = Counter(address for address, _ in nodes)
    by_address = {address: node for address, node in nodes if count[address] == 1}
    hosts = {member.id: member.address.rpartition(":")[0].strip("[]") for member in link.views.view().members}
    return {member_id: by_address[host] for member_id, host in hosts.items() if host in by_address}


def _near(node: str | None) -> dict[str, Any]:
    if node is None:
        return {}
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without the last option, tasks would wait forever for a node whose CPUs a training job holds.
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)}


class _Settings:
    """The settings of Ray that concurrent near reads share. The first sets them, the last restores them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._changed = ExitStack()

    @contextmanager
    def of(self, fs: MillraceFileSystem) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._changed.enter_context(_as_one_of_many(fs))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._changed.close()


_settings = _Settings()


@contextmanager
def _as_one_of_many(fs: MillraceFileSystem) -> Iterator[None]:
    """Make Ray create data sets in ways that work once per node, without its warnings about options."""
    from ray.data import DataContext
    from ray.data.datasource import file_based_datasource

    # The newer Parquet reader lists with actors of its own, which would be too many for every part.
    newer = _given(DataContext.get_current(), "use_datasource_v2", False)
    # Ray describes many files by a listing per part, or a task per sixteen files; here the metadata is cached.
    serial = _given(file_based_datasource, "FILE_SIZE_FETCH_PARALLELIZATION_THRESHOLD", sys.maxsize)
    with newer, serial if fs._options.max_age_seconds else nullcontext(), warnings.catch_warnings():
        # There is no other option yet for a preferred node.
        warnings.filterwarnings("ignore", ".*ray_remote_args.* is deprecated")
        yield


@contextmanager
def _given(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, if it exists, to `value` for a `with` block."""
    before = getattr(holder, name, None)
    if before is None:
        yield
        return
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _keep_near(dataset: Any, near: Mapping[str, Any]) -> None:
    """Place the steps of `then` on the same node, if Ray does not fuse them with the read."""
    strategy = near.get("scheduling_strategy")
    steps = [getattr(getattr(dataset, "_logical_plan", None), "dag", None)]
    while strategy is not None and steps:
        step = steps.pop()
        options = getattr(step, "ray_remote_args", None)
        if isinstance(options, dict) and "label_selector" not in options:
            options.setdefault("scheduling_strategy", strategy)
        steps += getattr(step, "input_dependencies", None) or []


def _blocks(parts: Sequence[NodeShare]) -> int:
    """The number of blocks that Ray would choose for one read of everything; it would choose as many for each part."""
    import ray
    from ray.data import DataContext

    context = DataContext.get_current()
    nbytes = sum(part.nbytes for part in parts)
    reasonable = min(context.read_op_min_num_blocks, nbytes // max(1, context.target_min_block_size or 1))
    needed = nbytes // (context.target_max_block_size or max(1, nbytes))
    return max(1, int(reasonable), int(needed), int(2 * ray.cluster_resources().get("CPU", 1)))


def _after(then: Callable[[Any], Any] | None, dataset: Any) -> Any:
    return dataset if then is None else then(dataset)
