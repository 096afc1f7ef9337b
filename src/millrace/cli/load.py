"""`millrace load`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millrace.cli.common import (
    cache_dir_option,
    endpoint_option,
    file_system,
    json_option,
    node_option,
    time_text,
)
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.filesystem import MillraceFileSystem
    from millrace.filesystem.loading import LoadProgress

CACHE_FULL = 3
"""The exit code when not everything fitted."""

_LINE_SECONDS = 10.0


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "--verify", is_flag=True, help="Check every byte that is in the cache already, and fetch what is wrong anew."
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
) -> int:
    """Bring objects into the cache before anybody reads them: this node's, or in a cluster every node's its share.

    URL is an object (s3://bucket/key), a prefix (everything below it), or a quoted pattern ('s3://bucket/train/*.parquet',
    '**' for any depth). What is in the cache already is skipped: after Ctrl-C, a kill or an error the same command goes on
    where it was. A bar shows progress on a terminal, else a line on stderr every ten seconds. The cluster is the one that
    the option 'members' of the environment or of millrace.toml names, or the one of --node; its nodes read the origin with
    their own credentials.

    Exit code 3: the cache is full, and not everything is in it.
    """
    from millrace.cli import tell
    from millrace.demo import interrupts
    from millrace.errors import DiskFullError

    fs = file_system(urls, cache_dir, endpoint_url, asks=True)
    display = _Bar() if sys.stderr.isatty() else _Lines()
    try:
        with interrupts.remembered():
            done = _load(fs, urls, node, cache_dir, display, verify=verify)
    except DiskFullError as error:
        display.end()
        tell(str(error))
        return CACHE_FULL
    except KeyboardInterrupt as end:
        display.end()
        word, code = end.args if len(end.args) == 2 else ("interrupted", 130)
        tell(f"{word}: {_here(display.last)}; run the same command again to go on")
        return _leave(code)
    except BaseException:
        display.end()
        raise
    display.end()
    if as_json:
        click.echo(json.dumps({**asdict(done), "seconds": round(done.seconds, 3)}))
        return 0
    speed = f" ({size_text(done.fetched_bytes / done.seconds)}/s)" if done.fetched_bytes and done.seconds else ""
    before = size_text(done.done_bytes - done.fetched_bytes)
    click.echo(
        f"{done.done_objects} objects, {size_text(done.done_bytes)}, are in the cache: {size_text(done.fetched_bytes)} "
        f"fetched in {time_text(done.seconds)}{speed}, {before} were there"
        + (f"; on {done.nodes} nodes" if done.nodes > 1 else "")
    )
    if verify:
        click.echo(f"every block was checked: {done.bad_blocks or 'none'} had to be fetched anew")
    return 0


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
        _say_if_alone(cache_dir)
        return fs.load(urls, progress=progress, verify=verify)
    from millrace.config import resolve
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


def _say_if_alone(cache_dir: Sequence[str]) -> None:
    """Say that a cluster is left out, where a node of one runs here and nothing names it."""
    from millrace.cli import tell
    from millrace.config import resolve
    from millrace.peers.attach import link_for
    from millrace.peers.folder import live_nodes

    options = resolve({"cache_dir": list(cache_dir) or None})
    if options.members == "auto" and (here := live_nodes(options)) and link_for(options) is None:
        address = here[0].facts.address
        tell(f"only this machine's cache is loaded: set 'members', or give --node {address}, for the whole cluster")


def _here(state: LoadProgress | None) -> str:
    if state is None or not state.objects:
        return "nothing was loaded yet"
    more = "" if state.listed else " or more"
    return (
        f"{state.done_objects} of {state.objects}{more} objects, {size_text(state.done_bytes)} of "
        f"{size_text(state.nbytes)}{more}, are in the cache"
    )


def _leave(code: int) -> int:
    """End the process now where a request still waits for a server: it has nothing to lose, and nobody wants to wait."""
    if any(thread.name.startswith("millrace-load") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class _Lines:
    """Progress for a log: now and then a line on stderr."""

    def __init__(self) -> None:
        self.last: LoadProgress | None = None
        self._next = time.monotonic() + _LINE_SECONDS

    def __call__(self, state: LoadProgress) -> None:
        self.last = state
        if time.monotonic() >= self._next:
            self._next += _LINE_SECONDS
            click.echo(progress_text(state), err=True)

    def end(self) -> None:
        """Nothing to clean up."""


class _Bar(_Lines):
    """Progress on a terminal: one line, written over and over."""

    def __call__(self, state: LoadProgress) -> None:
        self.last = state
        text = progress_text(state)
        columns = shutil.get_terminal_size().columns
        room = min(30, columns - len(text) - 4)
        if room >= 5 and state.nbytes:
            full = round(room * state.done_bytes / state.nbytes)
            text = f"[{'#' * full}{'.' * (room - full)}] {text}"
        click.echo(f"\r{text[: columns - 1]}\x1b[K", err=True, nl=False)

    def end(self) -> None:
        """Leave the line."""
        if self.last is not None:
            click.echo("\r\x1b[K", err=True, nl=False)


def progress_text(state: LoadProgress) -> str:
    """How far a load is, in a line."""
    if not state.objects:
        return "looking up what to load"
    percent = f"{100 * state.done_bytes // state.nbytes}%, " if state.nbytes and state.listed else ""
    more = "" if state.listed else "+"
    left = state.seconds_left
    return (
        f"{percent}{state.done_objects} of {state.objects}{more} objects, {size_text(state.done_bytes)} of "
        f"{size_text(state.nbytes)}{more}, {size_text(state.bytes_per_second)}/s"
        + (f", {time_text(left)} left" if left else "")
        + (f", {state.nodes} nodes" if state.nodes > 1 else "")
    )
