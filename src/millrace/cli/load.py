"""`millrace load`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millrace.cli.commands import LibraryCommand
from millrace.cli.common import (
    ProgressLine,
    cache_dir_option,
    counted,
    duration_text,
    endpoint_option,
    file_system,
    json_option,
    node_option,
    print_json,
    print_message,
    print_note,
    shown,
    time_text,
)
from millrace.config import resolve
from millrace.errors import DiskFullError
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.filesystem import MillraceFileSystem
    from millrace.filesystem.loading import LoadProgress

_CACHE_FULL = 3  # the exit code if not everything fits into the cache


@click.command(cls=LibraryCommand)
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "--verify", is_flag=True, help="Check every cached byte against its checksum, and fetch wrong blocks again."
)
@node_option
@cache_dir_option
@endpoint_option
@json_option
def load(
    urls: tuple[str, ...],
    verify: bool,
    node: str | None,
    cache_dir: tuple[str, ...],
    endpoint_url: str | None,
    as_json: bool,
) -> None:
    """Load objects into the cache before they are read.

    URL is an object (s3://bucket/key), a prefix (everything below it), or a quoted pattern ('s3://bucket/train/*.parquet',
    '**' for any depth). Cached blocks are skipped: after Ctrl-C, a kill or an error, run the same command again to
    continue. Progress is a bar on a terminal, else a line on stderr every ten seconds.

    In a cluster every node loads its share, with its own credentials. The cluster is the one that the option 'members'
    in the environment or in millrace.toml names, or the one of --node.

    Exit code 3: the cache is full, and not everything is in it.
    """
    fs = file_system(urls, cache_dir, endpoint_url, sends_requests=True)
    with loading() as display:
        done = _load(fs, urls, node, cache_dir, display, verify=verify)
    if as_json:
        print_json({**asdict(done), "seconds": round(done.seconds, 3)})
        return
    speed = f" ({size_text(done.fetched_bytes / done.seconds)}/s)" if done.fetched_bytes and done.seconds else ""
    before = size_text(done.done_bytes - done.fetched_bytes)
    verb = "is" if done.done_objects == 1 else "are"
    click.echo(
        f"{counted(done.done_objects, 'object')}, {size_text(done.done_bytes)}, {verb} in the cache: "
        f"{size_text(done.fetched_bytes)} fetched in {duration_text(done.seconds)}{speed}, {before} were cached before"
        + (f"; on {done.nodes} nodes" if done.nodes > 1 else "")
    )
    if verify:
        click.echo(f"every block was checked: {done.bad_blocks or 'none'} had to be fetched again")


def _load(
    fs: MillraceFileSystem,
    urls: Sequence[str],
    node: str | None,
    cache_dir: Sequence[str],
    progress: Callable[[LoadProgress], None],
    *,
    verify: bool,
) -> LoadProgress:
    if node is None:
        _warn_if_alone(cache_dir)
        return fs.load(urls, progress=progress, verify=verify)
    from millrace.filesystem.cluster_access import access_through
    from millrace.filesystem.cluster_loading import keys_of, load_on_cluster

    with access_through(node, resolve({})) as cluster:
        return load_on_cluster(
            cluster.views,
            cluster.client,
            fs.origin_identity,
            keys_of(fs, urls),
            replicas=cluster.replicas,
            progress=progress,
            verify=verify,
        )


def _warn_if_alone(cache_dir: Sequence[str]) -> None:
    """Print a message if a cluster node runs on this machine, but no option names its cluster."""
    from millrace.cluster.attach import link_for
    from millrace.cluster.folder import live_nodes

    options = resolve({"cache_dir": list(cache_dir) or None})
    if options.members == "auto" and (here := live_nodes(options)) and link_for(options) is None:
        address = here[0].facts.address
        print_note(
            f"only this machine's cache is loaded: set 'members' or --node {address} to load on the whole cluster"
        )


@contextlib.contextmanager
def loading() -> Iterator[LoadDisplay]:
    """Display the progress of a load in the block. Ends the command if the cache is full, and on Ctrl-C."""
    display = LoadDisplay()
    try:
        with shown(display):
            yield display
    except DiskFullError as error:
        print_message(str(error))
        raise click.exceptions.Exit(_CACHE_FULL) from error
    except click.exceptions.Exit as end:
        _leave(end.exit_code)
        raise


def _leave(code: int) -> None:
    """End the process now if a request still waits for a server: it has no state to lose."""
    if any(thread.name.startswith("millrace-load") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class LoadDisplay(ProgressLine):
    """Shows the progress of a load; `last` is the last progress."""

    def __init__(self) -> None:
        super().__init__()
        self.last: LoadProgress | None = None

    def __call__(self, state: LoadProgress) -> None:
        self.last = state
        if self.is_due():
            self.show(progress_text(state), state.done_bytes, state.nbytes)

    def so_far(self) -> str:
        state, then = self.last, "; run the same command again to continue"
        if state is None or not state.objects:
            return f"nothing was loaded yet{then}"
        more = "" if state.listed else " or more"
        return (
            f"{state.done_objects} of {state.objects}{more} objects, {size_text(state.done_bytes)} of "
            f"{size_text(state.nbytes)}{more}, are in the cache{then}"
        )


def progress_text(state: LoadProgress) -> str:
    """The progress of a load in one line."""
    if not state.objects:
        return "listing"
    percent = f"{100 * state.done_bytes // state.nbytes}%, " if state.nbytes and state.listed else ""
    more = "" if state.listed else "+"
    left = state.seconds_left
    return (
        f"{percent}{state.done_objects} of {state.objects}{more} objects, {size_text(state.done_bytes)} of "
        f"{size_text(state.nbytes)}{more}, {size_text(state.bytes_per_second)}/s"
        + (f", {time_text(left)} left" if left else "")
        + (f", {state.nodes} nodes" if state.nodes > 1 else "")
    )
