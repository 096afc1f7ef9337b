"""Reads of Ray Data that run on the nodes which hold the data.

Ray Data has no way for a data source to say where a task should run. But a read can be told, as a whole, on which node its
tasks should rather run: so a read is made of one read a node.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileSystem

from millrace.cache.blocks import object_id
from millrace.cluster.locations import millrace_of
from millrace.errors import DeniedError, MillraceError, UsageError
from millrace.filesystem import MillraceFileSystem
from millrace.filesystem.cluster_loading import start_everywhere
from millrace.filesystem.describing import describe_many
from millrace.members import NodeLink
from millrace.origin import ObjectInfo
from millrace.peers.attach import link_for
from millrace.peers.placement import Placement, stripe_count, stripe_span

if TYPE_CHECKING:
    import ray.data

_log = logging.getLogger("millrace")

_BY_RAY = ("auto", "ray")
_FILE_BYTES = 256 << 10
"""What opening a file costs, as bytes that are read in that time: for shares of many small files and few large ones."""

_SHARED = ("override_num_blocks", "concurrency")
"""Options of the whole read that its parts get shares of."""

_SKIPPED = (".", "_")
"""What paths below a folder begin with that Ray does not read."""


def homes(filesystem: FileSystem, paths: Iterable[str]) -> list[str | None]:
    """The id of the Ray node that owns each object, and so has it on its disk once it was read.

    None where that is not known: no cluster, no node of Ray, no such object. Of an object of several stripes it is the node
    with most of them. Costs no request for each object: one listing for every thousand keys, or none where they are
    remembered. Raises `OriginUnavailableError` where the storage does not answer.
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

        ds = millrace.cluster.read_near(ray.data.read_images, "s3://bucket/train", filesystem=fs, then=decoded)

    `read` is one of Ray Data's for files, or any function with the same arguments that hands `ray_remote_args` on. It is
    called once for each node that owns some of the files, and the data sets are united in the order of the nodes' ids.
    `then` is applied to each of them before: the `map_batches` in it run on that node as well (with `batch_size=None` in the
    very tasks that read), while what comes after the union may run anywhere.

    A node that is busy or gone costs nothing but locality: its tasks run elsewhere. `override_num_blocks` and `concurrency`
    are shared out by the size of the files, at least one a node. Without a cluster, or on one node, it is the plain read.
    """
    for name in ("scheduling_strategy", "label_selector"):
        if options.get(name) or (options.get("ray_remote_args") or {}).get(name):
            raise UsageError(f"{name} says where to read, and so does read_near", next_step="call the read itself")
    fs = millrace_of(filesystem)
    chosen = [paths] if isinstance(paths, str) else list(paths)
    parts = None if fs is None else _parts(fs, chosen, ignore_missing=bool(options.get("ignore_missing_paths")))
    if fs is None or parts is None:
        return _after(then, read(paths, filesystem=filesystem, **options))
    options = {**options, "override_num_blocks": options.get("override_num_blocks") or _blocks(parts)}
    costs = [part.cost for part in parts]
    shares = {name: share_out(options[name], costs) for name in _SHARED if options.get(name)}
    datasets = []
    with _as_one_of_many(fs):
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
    """`total` in whole shares that follow `costs`, which are positive, each at least 1 (so their sum may be more). Pure."""
    spare, whole = max(0, total - len(costs)), sum(costs)
    shares = [1 + spare * cost // whole for cost in costs]
    by_remainder = sorted(range(len(costs)), key=lambda place: -(spare * costs[place] % whole))
    for place in by_remainder[: max(0, total - sum(shares))]:
        shares[place] += 1
    return shares


@dataclass
class Part:
    """What is read near one node; None: anywhere."""

    node: str | None
    paths: list[str] = field(default_factory=list)
    nbytes: int = 0

    @property
    def cost(self) -> int:
        """What reading it takes, in bytes."""
        return self.nbytes + _FILE_BYTES * len(self.paths)


def grouped(files: Iterable[tuple[str, ObjectInfo | None]], home: Callable[[ObjectInfo], str | None]) -> list[Part]:
    """Files by the nodes they are near, in the order of the nodes' ids; those near none come first. Pure but for `home`."""
    parts: dict[str, Part] = {}
    for path, info in files:
        node = None if info is None else home(info)
        part = parts.setdefault(node or "", Part(node))
        part.paths.append(path)
        part.nbytes += 0 if info is None else info.size
    return [parts[node] for node in sorted(parts)]


def _parts(fs: MillraceFileSystem, paths: Sequence[str], *, ignore_missing: bool) -> list[Part] | None:
    """The files that `paths` name, by the nodes they are near; None where no node is nearer than another."""
    if fs._options.members == "none":
        return None
    import ray

    if not ray.is_initialized():
        # As the read itself would: in a submitted job nobody need have said `ray.init`.
        importlib.import_module("ray._private.auto_init_hook").auto_init_ray()
    # On the others, as on many a head node, no task runs.
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
    """The files that are named, or lie below a folder that is, as Ray would find them; without a description: unknown."""
    infos = describe_many(fs, map(fs.key_of, paths))
    for path in paths:
        info = infos.get(fs.key_of(path))
        if info is not None:
            yield path, info
            continue
        try:
            below = list(_below(fs, path))
        except DeniedError:  # who may read an object may not be allowed to list
            yield path, None
            continue
        yield from below
        if not below and not ignore_missing:
            yield path, None  # Ray has an error for that


def _below(fs: MillraceFileSystem, path: str) -> Iterable[tuple[str, ObjectInfo]]:
    start = len(fs.key_of(path))
    for page in fs.list_all(path):
        for info in page:
            if not info.key.endswith("/") and not info.key[start:].lstrip("/").startswith(_SKIPPED):
                yield fs.unstrip_protocol(info.key), info


@dataclass(frozen=True)
class _Owners:
    """Who owns what, and on which Ray node that is."""

    identity: str
    placement: Placement
    ray_nodes: Mapping[str, str]

    @classmethod
    def of(cls, fs: MillraceFileSystem, *, start: bool = False) -> _Owners | None:
        """By the newest view; None where there is no cluster. `start` starts nodes where Ray has none yet."""
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
            # As the file system itself, which then reads without a cluster.
            _log.warning("nobody knows which node is near to what: %s", error)
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
        # Of equals the one that was counted first.
        return self.ray_nodes.get(owned.most_common(1)[0][0]) if owned else None


def _ray_nodes(fs: MillraceFileSystem, link: NodeLink, *, by_ray: bool) -> dict[str, str]:
    """The Ray nodes of the members, by the members' ids."""
    if by_ray:
        found: dict[str, str] = importlib.import_module("millrace.members.ray").ray_nodes(fs._options)
        return found
    import ray

    if not ray.is_initialized():
        return {}
    # Members of their own kind: by the machine's address, where only one Ray node has it.
    nodes = [(str(node["NodeManagerAddress"]), str(node["NodeID"])) for node in ray.nodes() if node["Alive"]]
    count = Counter(address for address, _ in nodes)
    by_address = {address: node for address, node in nodes if count[address] == 1}
    hosts = {member.id: member.address.rpartition(":")[0].strip("[]") for member in link.views.view().members}
    return {member_id: by_address[host] for member_id, host in hosts.items() if host in by_address}


def _near(node: str | None) -> dict[str, Any]:
    if node is None:
        return {}
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without the last one tasks would wait for a node whose CPUs a training holds, for ever.
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)}


@contextmanager
def _as_one_of_many(fs: MillraceFileSystem) -> Iterator[None]:
    """Have Ray make data sets in ways that can be had once a node, and hear no word of options that it wants otherwise."""
    from ray.data import DataContext
    from ray.data.datasource import file_based_datasource

    # The newer way to read Parquet lists with actors of its own: for every part these would be too many.
    newer = _given(DataContext.get_current(), "use_datasource_v2", False)
    # Many files are described by a listing of their folder for each part, or by one task for sixteen: here it is remembered.
    serial = _given(file_based_datasource, "FILE_SIZE_FETCH_PARALLELIZATION_THRESHOLD", sys.maxsize)
    with newer, serial if fs._options.max_age_seconds else nullcontext(), warnings.catch_warnings():
        # There is no other option yet for a node that is only preferred.
        warnings.filterwarnings("ignore", ".*ray_remote_args.* is deprecated")
        yield


@contextmanager
def _given(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Have an attribute, where there is one, be `value` for a while."""
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
    """Have what `then` added run on the same node also where Ray does not make one task of it and the read."""
    strategy = near.get("scheduling_strategy")
    steps = [getattr(getattr(dataset, "_logical_plan", None), "dag", None)]
    while strategy is not None and steps:
        step = steps.pop()
        options = getattr(step, "ray_remote_args", None)
        if isinstance(options, dict) and "label_selector" not in options:
            options.setdefault("scheduling_strategy", strategy)
        steps += getattr(step, "input_dependencies", None) or []


def _blocks(parts: Sequence[Part]) -> int:
    """How many blocks Ray would choose for one read of it all: it would choose as many for each part."""
    import ray
    from ray.data import DataContext

    context = DataContext.get_current()
    nbytes = sum(part.nbytes for part in parts)
    reasonable = min(context.read_op_min_num_blocks, nbytes // max(1, context.target_min_block_size or 1))
    needed = nbytes // (context.target_max_block_size or max(1, nbytes))
    return max(1, int(reasonable), int(needed), int(2 * ray.cluster_resources().get("CPU", 1)))


def _after(then: Callable[[Any], Any] | None, dataset: Any) -> Any:
    return dataset if then is None else then(dataset)
