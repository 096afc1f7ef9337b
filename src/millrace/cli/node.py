"""`millrace node run` and `millrace node drain`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.common import cache_dir_option, json_option
from millrace.members.protocol import WIRE_VERSIONS

if TYPE_CHECKING:
    from millrace.config import CacheOptions
    from millrace.events import Event
    from millrace.filesystem.node_leaving import DrainReport
    from millrace.filesystem.node_process import NodeProcess
    from millrace.origin import Origin

DEFAULT_PORT = 7411
"""Where a node listens when nobody says where."""

_OF_INTEREST = (
    "cluster.",
    "peer.breaker.",
    "peer.corrupt",
    "cache.disk.",
    "cache.full",
    "cache.store.discarded",
    "cache.rules.unreadable",
)
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 30.0
_END_SECONDS = 10.0


@click.group()
def node() -> None:
    """One machine's share in a cluster: run it, or have it leave."""


@node.command()
@click.option("--listen", metavar="HOST:PORT", help="Where the other nodes reach this one.")
@click.option("--members", help="The cluster: etcd://host:port[,...][/name] or static://host:port,host:port,...")
@click.option("--etcd-host", help="Short for --members etcd://HOST:2379.")
@cache_dir_option
@click.option("--capacity", help="Most bytes on a disk: 200GB, or 80% of it.")
@click.option("--min-free", help="What a disk keeps free: 50GB, or 10% of it.")
@click.option("--replicas", type=int, help="How many nodes keep each block; the same on all of them.")
@click.option("--tls", metavar="FOLDER", help="A folder with cert.pem, key.pem and ca.pem.")
@click.option(
    "--origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="What it may read for others besides what its environment names: a storage's URL, https://host[:port] for S3.",
)
@click.option(
    "--newest-wire",
    type=click.IntRange(*WIRE_VERSIONS),
    default=WIRE_VERSIONS[1],
    help="Speak no newer version of the nodes' language than this.",
    hidden=True,
)
@click.option("--drain-seconds", type=float, default=60.0, show_default=True, help="Longest time for a planned leave.")
@json_option
def run(
    listen: str | None,
    members: str | None,
    etcd_host: str | None,
    cache_dir: tuple[str, ...],
    capacity: str | None,
    min_free: str | None,
    replicas: int | None,
    tls: str | None,
    origins: tuple[str, ...],
    newest_wire: int,
    drain_seconds: float,
    as_json: bool,
) -> int:
    """Be a node of a cluster, until SIGTERM or Ctrl-C: then it leaves, and others take over what it has.

    A second signal ends it at once. The cluster's secret comes from MILLRACE_CLUSTER_TOKEN or from 'cluster_token' in
    millrace.toml; credentials for the origin come from the environment. The line that begins with READY says where it
    listens; there is one line for each event of interest.
    """
    from millrace.cli import tell
    from millrace.config import resolve
    from millrace.filesystem.node_process import NodeProcess

    if not 0 <= drain_seconds <= 3600:
        raise click.UsageError("--drain-seconds is a number from 0 to 3600")
    options = resolve(
        {
            "members": members,
            "etcd_host": etcd_host,
            "cache_dir": list(cache_dir) or None,
            "capacity": capacity,
            "min_free": min_free,
            "replicas": replicas,
            "tls": tls,
        }
    )
    host, port = listening_address(options, listen)
    if listen is None and options.members.startswith("etcd://") and ip_address(host).is_loopback:
        tell(f"{host} can be reached from this machine only: give --listen where others are to join")
    process = NodeProcess(
        options, host=host, port=port, origins=[_origin(url) for url in origins], wire=(WIRE_VERSIONS[0], newest_wire)
    )
    with _signals() as ended, _events(as_json):
        process.start()
        try:
            _ready(process, as_json)
            while not ended.is_set() and not process.left.wait(_LOOK_SECONDS):
                pass
            if not process.left.is_set():
                _report(process.drain(drain_seconds))
        finally:
            process.close()
    return 0


def _ready(process: NodeProcess, as_json: bool) -> None:
    if as_json:
        _print(json.dumps({"event": "ready", "address": process.address, "member": process.member_id}))
    else:
        _print(f"READY {process.address} member {process.member_id}")


def _report(report: DrainReport) -> None:
    from millrace.cli import tell

    if report.did_not:
        tell(f"left after {report.seconds:.0f} s; {len(report.did_not)} nodes had not taken over everything by then")


# --- where it listens, what it may read ----------------------------------------------------------------------


def listening_address(options: CacheOptions, listen: str | None) -> tuple[str, int]:
    """Host and port to listen on: what was given, or the static address of this machine, or the one that faces etcd.

    Raises `ConfigurationError`.
    """
    from millrace.config import parse_addresses, parse_etcd
    from millrace.errors import ConfigurationError

    if listen is not None:
        given = parse_addresses(listen, option="--listen")
        if len(given) != 1 or given[0][0] in ("0.0.0.0", "::"):
            raise ConfigurationError(
                f"--listen {listen} is not where the others reach this node",
                next_step="name one address of this machine",
            )
        return given[0]
    scheme, _, text = options.members.partition("://")
    if scheme == "static":
        own = [address for address in parse_addresses(text, option="members") if _is_local(address[0])]
        if len(own) != 1:
            raise ConfigurationError(
                f"{'several' if own else 'none'} of the addresses {text} are this machine's",
                next_step="say with --listen which one this node has",
            )
        return own[0]
    if scheme == "etcd":
        return _address_towards(*parse_etcd(options.members)[0][0]), DEFAULT_PORT
    raise ConfigurationError(
        f"members={options.members!r} names no cluster that a node can join",
        next_step="give --members etcd://host:port or static://host:port,host:port",
    )


def _is_local(host: str) -> bool:
    """Whether this machine has the address of `host`."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    except OSError:
        pass  # a name that is not known is not ours
    return False


def _address_towards(host: str, port: int) -> str:
    """The address of this machine that packets to `host` leave from. Sends none."""
    from millrace.errors import ConfigurationError

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"there is no way to {host}: {error.strerror or error}", next_step="check the name, or give --listen"
        ) from error


def _origin(url: str) -> Origin:
    """The origin that `--origin` names: the address of an S3 service, or the URL of a storage without a path in it."""
    from millrace.errors import ConfigurationError, UsageError
    from millrace.origin import open_origin, origin_for_url

    scheme, separator, rest = url.partition("://")
    if scheme in ("http", "https") and rest.strip("/"):
        return open_origin("s3", {"endpoint_url": url})
    try:
        origin, key = origin_for_url(url) if separator else (None, "")
    except UsageError as error:
        raise ConfigurationError(
            f"--origin {url} cannot be used: {error.message}", next_step=error.next_step
        ) from error
    if origin is None or origin.head_is_local or "/" in key.strip("/") or (key.strip("/") and "@" not in rest):
        raise ConfigurationError(
            f"--origin {url} is no storage service",
            next_step="write https://host[:port] of an S3 service, or s3://, az://, gs:// or hf:// for the environment's",
        )
    return origin


# --- signals and lines -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that is set by the first signal that asks for an end; the second one ends the process."""
    ended = threading.Event()

    def asked(number: int, _: FrameType | None) -> None:
        if ended.is_set():
            os.write(2, b"millrace: ended at once\n")
            os._exit(128 + number)
        ended.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup(1) ignores it, and means it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, asked) for number in numbers}
    try:
        yield ended
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _events(as_json: bool) -> Iterator[None]:
    """Print a line for each event of interest while the block runs."""
    from millrace.events import add_hook

    def hear(event: Event) -> None:
        if event.name.startswith(_OF_INTEREST):
            _print(json.dumps(_as_json(event)) if as_json else _as_text(event))

    remove = add_hook(hear)
    try:
        yield
    finally:
        remove()


def _as_json(event: Event) -> dict[str, Any]:
    return {
        "event": event.name,
        "time": round(time.time(), 3),
        "subject": event.subject,
        "nbytes": event.nbytes,
        "detail": event.detail,
    }


def _as_text(event: Event) -> str:
    from millrace.errors import printable

    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return printable(" ".join(f"{stamp} {event.name} {event.subject} {event.detail}".split()))


_printing = threading.Lock()


def _print(line: str) -> None:
    """One line on stdout at once, also from several threads. That nobody can read it any more does not end a node."""
    with _printing, contextlib.suppress(OSError, ValueError):
        click.echo(line)
        if sys.stdout is not None:
            sys.stdout.flush()


# --- drain -------------------------------------------------------------------------------------------------------


@node.command()
@click.argument("address", required=False)
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Longest time it may take.")
@cache_dir_option
@json_option
def drain(address: str | None, seconds: float, cache_dir: tuple[str, ...], as_json: bool) -> int:
    """Have a node leave its cluster: this machine's, or the one at ADDRESS (host:port).

    The others take over what it has, from its disk; then its process ends. Returns when that is so.
    """
    from millrace.cli import tell
    from millrace.config import resolve
    from millrace.filesystem.cluster_access import access_through

    if not 0 <= seconds <= 3600:
        raise click.UsageError("--seconds is a number from 0 to 3600")
    options = resolve({"cache_dir": list(cache_dir) or None})
    address = address or _node_here(options)
    started = time.monotonic()
    with access_through(address, options) as cluster:
        cluster.client.call_address(address, "POST", "/v1/drain", {"seconds": seconds}, deadline=5.0)
        try:
            ended = _wait_until_left(
                lambda: cluster.client.call_address(address, "GET", "/v1/status", deadline=5.0),
                started + seconds + _GRACE_SECONDS,
            )
        except KeyboardInterrupt:
            tell(f"interrupted: {address} goes on leaving; 'millrace status' shows when it has gone")
            return 130
    took = round(time.monotonic() - started, 1)
    if as_json:
        click.echo(json.dumps({"address": address, "left": ended, "seconds": took}))
    elif ended:
        click.echo(f"{address} has left after {took} s")
    else:
        tell(f"{address} has not left after {took} s: see its log")
    return 0 if ended else 1


def _node_here(options: CacheOptions) -> str:
    from millrace.errors import ConfigurationError
    from millrace.peers.folder import live_nodes

    addresses = [live.facts.address for live in live_nodes(options)]
    if len(addresses) != 1:
        what = (
            f"{len(addresses)} nodes run on this machine ({', '.join(addresses)})" if addresses else "no node runs here"
        )
        raise ConfigurationError(what, next_step="name the ADDRESS of the node that is to leave")
    return addresses[0]


def _wait_until_left(ask: Callable[[], Any], deadline: float) -> bool:
    """Wait until a node has left, and has ended, a moment later; tells on stderr whom it waits for."""
    from millrace.errors import PeerRefusedError, PeerSilentError

    told: Sequence[str] | None = None
    has_left = False
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        try:
            status = ask()
        except PeerSilentError as error:
            if isinstance(error.__cause__, TimeoutError | BlockingIOError):
                continue  # it is there, and says nothing
            return True  # its process has ended
        except PeerRefusedError:
            continue
        if status["state"] == "left":
            deadline = deadline if has_left else min(deadline, time.monotonic() + _END_SECONDS)
            has_left = True
            continue
        if status.get("waiting_for") != told:
            told = status.get("waiting_for")
            click.echo(f"{len(told or ())} nodes are still taking over", err=True)
    return has_left
