"""`millrace node run`, `millrace node link` and `millrace node drain`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.commands import GroupedCommands
from millrace.cli.common import cache_dir_option, json_option, json_text, print_json, print_message, print_note
from millrace.cli.interrupts import handled
from millrace.cli.logs import log_others_to_stderr
from millrace.config import CacheOptions, parse_addresses, parse_etcd, resolve
from millrace.errors import ConfigurationError, PeerRefusedError, PeerSilentError, UsageError
from millrace.event_log import level_of, line_of
from millrace.events import Event, add_hook

if TYPE_CHECKING:
    from millrace.node.drain import DrainReport
    from millrace.node.process import NodeProcess
    from millrace.origin import Origin

DEFAULT_PORT = 7411
"""The default port of a node."""

_IMPORTANT = (
    "cluster.",
    "peer.breaker.",
    "peer.corrupt",
    "cache.disk.",
    "cache.full",
    "cache.store.discarded",
    "cache.rules.unreadable",
)
_ACCEPT_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 30.0
_END_SECONDS = 10.0


@click.group(cls=GroupedCommands)
def node() -> None:
    """Run a cluster node on this machine, drain one, or open its status page."""


@node.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Address for the other nodes. Default: this machine's in static://, or the one towards etcd, port 7411.",
)
@click.option(
    "--members",
    help="The cluster: etcd://host:port[,...][/name] or static://host:port,... Default: from the configuration.",
)
@click.option("--etcd-host", help="Short for --members etcd://HOST:2379. Default: from the configuration.")
@cache_dir_option
@click.option("--capacity", help="Largest size on a disk: 200GB, or 80% of it. Default: from the configuration.")
@click.option(
    "--min-free", help="Space that stays free on a disk: 50GB, or 10% of it. Default: from the configuration."
)
@click.option(
    "--replicas",
    type=int,
    help="Number of nodes that keep each block; the same on all nodes. Default: from the configuration.",
)
@click.option(
    "--tls", metavar="FOLDER", help="A folder with cert.pem, key.pem and ca.pem. Default: from the configuration."
)
@click.option(
    "--origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="Another storage that this node may read for others: its URL, or https://host[:port] for S3. Repeat for several.",
)
@click.option(
    "--drain-seconds", type=float, default=60.0, show_default=True, help="Time limit of the drain at the end."
)
@click.option(
    "--public-metrics",
    is_flag=True,
    envvar="MILLRACE_PUBLIC_METRICS",
    help="Serve /metrics without the cluster token.",
)
@json_option
def run(
    listen: str | None,
    cache_dir: tuple[str, ...],
    origins: tuple[str, ...],
    drain_seconds: float,
    public_metrics: bool,
    as_json: bool,
    **given: Any,  # other options of a file system
) -> int:
    """Run a node of a cluster until SIGTERM or Ctrl-C. It then drains: the other nodes copy its blocks.

    A second signal ends it at once. The cluster token comes from MILLRACE_CLUSTER_TOKEN or from 'cluster_token' in
    millrace.toml; credentials for the origin come from the environment. The line that begins with READY contains the
    address of the node. Each important event is one more line; other warnings are logged to stderr. GET /metrics on that
    address returns the metrics for Prometheus, with the token; /healthz and /readyz are for probes. 'millrace node link'
    prints the link to its status page.
    """
    from millrace.node import telemetry
    from millrace.node.process import NodeProcess

    if not 0 <= drain_seconds <= 3600:
        raise click.UsageError("--drain-seconds must be from 0 to 3600")
    options = resolve({**given, "cache_dir": list(cache_dir) or None})
    host, port = listening_address(options, listen)
    if listen is None and options.members.startswith("etcd://") and ip_address(host).is_loopback:
        print_note(f"{host} can be reached from this machine only: set --listen to let other machines join")
    process = NodeProcess(
        options,
        host=host,
        port=port,
        origins=[_origin(url) for url in origins],
        public_metrics=public_metrics,
    )
    with _signals() as ended, _events(as_json):
        process.start()
        try:
            if telemetry.is_in_use():
                telemetry.instrument(process.samples)
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
        _print(json_text({"event": "ready", "address": process.address, "member": process.member_id}))
    else:
        _print(f"READY {process.address} member {process.member_id}")


def _report(report: DrainReport) -> None:
    if report.did_not:
        print_message(
            f"left after {report.seconds:.0f} s; {len(report.did_not)} nodes had not copied all blocks by then"
        )


# --- address and origins ------------------------------------------------------------------------------------


def listening_address(options: CacheOptions, listen: str | None) -> tuple[str, int]:
    """Host and port to listen on: `listen`, or this machine's address in `members`, or the one towards etcd.

    Raises `ConfigurationError`.
    """
    from millrace.cluster.membership.backends import backend_of

    if listen is not None:
        given = parse_addresses(listen, option="--listen")
        if len(given) != 1 or given[0][0] in ("0.0.0.0", "::"):
            raise ConfigurationError(
                f"--listen {listen}: other nodes cannot reach this address",
                next_step="give one address of this machine",
            )
        return given[0]
    scheme, _, text = options.members.partition("://")
    if scheme == "static":
        own = [address for address in parse_addresses(text, option="members") if _is_local(address[0])]
        if len(own) != 1:
            raise ConfigurationError(
                f"{'several' if own else 'none'} of the addresses {text} belong to this machine",
                next_step="give the address of this node with --listen",
            )
        return own[0]
    if scheme == "etcd":
        return _address_towards(*parse_etcd(options.members)[0][0]), DEFAULT_PORT
    if "://" in options.members:
        backend_of(options.members)  # raises for an unknown one
        raise ConfigurationError(f"members={options.members!r} needs the node's address", next_step="give --listen")
    raise ConfigurationError(
        f"members={options.members!r} is not a cluster that a node can join",
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
        pass  # an unknown name is not this machine
    return False


def _address_towards(host: str, port: int) -> str:
    """The address of this machine that is the source of packets to `host`. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"{host}: cannot be reached: {error.strerror or error}", next_step="check the name, or give --listen"
        ) from error


def _origin(url: str) -> Origin:
    """The origin of `--origin`: the address of an S3 service, or the URL of a storage without a path."""
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
            f"--origin {url} is not a storage service",
            next_step="write https://host[:port] for S3, or s3://, az://, gs:// or hf:// for the one of the environment",
        )
    return origin


# --- signals and lines -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that the first signal sets; the second signal ends the process."""
    ended = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        if ended.is_set():
            os.write(2, b"millrace: ended at once\n")
            os._exit(128 + number)
        ended.set()

    with handled(handle):
        yield ended


@contextlib.contextmanager
def _events(as_json: bool) -> Iterator[None]:
    """Print a line for each important event while the block runs. Other warnings are logged to stderr."""

    def on_event(event: Event) -> None:
        if event.name.startswith(_IMPORTANT):
            _print(json_text(_as_json(event)) if as_json else _as_text(event))

    log_others_to_stderr(_IMPORTANT)
    remove = add_hook(on_event)
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
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {logging.getLevelName(level_of(event))} {line_of(event)}"


_printing = threading.Lock()


def _print(line: str) -> None:
    """Write one line to stdout and flush it. Thread-safe. A closed stdout does not end the node."""
    with _printing, contextlib.suppress(OSError, ValueError):
        click.echo(line)
        if sys.stdout is not None:
            sys.stdout.flush()


# --- link ------------------------------------------------------------------------------------------------------


@node.command()
@click.argument("address", required=False)
@cache_dir_option
@json_option
def link(address: str | None, cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Print the link to the status page of a node: the one on this machine, or the one at ADDRESS (host:port).

    The link contains the cluster token, which grants access to all cached data: open it yourself, and do not share it.
    """
    from urllib.parse import quote

    from millrace.filesystem.cluster_access import access_through, secrets_for

    options = resolve({"cache_dir": list(cache_dir) or None})
    if address is None:
        address = _node_here(options)
    with access_through(address, options):  # it responds, and accepts the token
        token, tls = secrets_for(address, options)
    # Browsers do not send the part after '#'.
    url = f"{'http' if tls is None else 'https'}://{address}/#token={quote(token, safe='')}"
    if as_json:
        print_json({"address": address, "url": url})
    else:
        click.echo(url)


# --- drain -------------------------------------------------------------------------------------------------------


@node.command()
@click.argument("address", required=False)
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Time limit.")
@cache_dir_option
@json_option
def drain(address: str | None, seconds: float, cache_dir: tuple[str, ...], as_json: bool) -> int:
    """Drain a node: the one on this machine, or the one at ADDRESS (host:port).

    The other nodes copy its blocks from its disk; then its process ends, and this command returns.
    """
    from millrace.filesystem.cluster_access import access_through

    if not 0 <= seconds <= 3600:
        raise click.UsageError("--seconds must be from 0 to 3600")
    options = resolve({"cache_dir": list(cache_dir) or None})
    if address is None:  # an empty ADDRESS, from an unset variable, must not drain this machine
        address = _node_here(options)
    started = time.monotonic()
    with access_through(address, options) as cluster:
        cluster.client.call(address, "POST", "/v1/drain", {"seconds": seconds}, deadline=_ACCEPT_SECONDS)
        try:
            ended = _wait_until_left(
                lambda: cluster.client.call(address, "GET", "/v1/status", deadline=5.0),
                started + seconds + _GRACE_SECONDS,
            )
        except KeyboardInterrupt:
            print_message(f"interrupted: {address} continues to drain; 'millrace status' shows its state")
            return 130
    took = round(time.monotonic() - started, 1)
    if as_json:
        print_json({"address": address, "left": ended, "seconds": took})
    elif ended:
        click.echo(f"{address} has left after {took} s")
    else:
        print_message(f"{address} has not left after {took} s: check its log")
    return 0 if ended else 1


def _node_here(options: CacheOptions) -> str:
    from millrace.cluster.folder import live_nodes

    addresses = [live.facts.address for live in live_nodes(options)]
    if len(addresses) != 1:
        what = (
            f"{len(addresses)} nodes run on this machine ({', '.join(addresses)})"
            if addresses
            else "no node runs on this machine"
        )
        raise ConfigurationError(what, next_step="give the ADDRESS of a node")
    return addresses[0]


def _wait_until_left(read_status: Callable[[], Any], deadline: float) -> bool:
    """Wait until a node has left and its process has ended, or was replaced by another one since the call.

    Prints on stderr how many nodes still copy blocks.
    """
    waiting_for: Sequence[str] | None = None
    has_left = False
    began = time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        try:
            status = read_status()
        except PeerSilentError as error:
            if isinstance(error.__cause__, TimeoutError | BlockingIOError):
                continue  # it runs, but does not respond
            return True  # its process has ended
        except PeerRefusedError:
            continue
        if status["seconds"] < time.monotonic() - began:
            return True  # a service manager has started it again
        if status["state"] == "left":
            deadline = deadline if has_left else min(deadline, time.monotonic() + _END_SECONDS)
            has_left = True
            continue
        if status.get("waiting_for") != waiting_for:
            waiting_for = status.get("waiting_for")
            click.echo(f"{len(waiting_for or ())} nodes are still copying blocks", err=True)
    return has_left
