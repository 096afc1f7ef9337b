"""Shared by the commands: options, the cache or storage that a command uses, and output."""

from __future__ import annotations

import abc
import contextlib
import json
import math
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from unicodedata import combining, east_asian_width
from urllib.parse import urlsplit

import click

from millrace.cli.interrupts import remembered
from millrace.config import CacheOptions, resolve
from millrace.errors import ConfigurationError, UsageError, printable, without_queries
from millrace.events import Event, add_hook

if TYPE_CHECKING:
    from millrace.cache.eviction.retention import Place
    from millrace.cache.node import CacheNode
    from millrace.filesystem import MillraceFileSystem
    from millrace.filesystem.cluster_access import ClusterAccess

F = TypeVar("F", bound=Callable[..., object])

_WEB = ("http", "https")
_LINE_SECONDS = 10.0
_BAR_SECONDS = 0.1


def cache_dir_option(command: F) -> F:
    """`--cache-dir`, several times."""
    text = "Cache directory; repeat for several disks. Default: from the configuration."
    return click.option("--cache-dir", multiple=True, help=text)(command)


def endpoint_option(command: F) -> F:
    """`--endpoint-url`."""
    return click.option("--endpoint-url", help="Address of the storage service, if it is not the default.")(command)


def node_option(command: F) -> F:
    """`--node`."""
    text = "Use the cluster of the node at this address instead of the configured one."
    return click.option("--node", metavar="HOST:PORT", help=text)(command)


def json_option(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


class NumberRange(click.FloatRange):
    """A range of numbers without `nan`, which no comparison excludes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Raises `click.BadParameter`."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is a terminal. A standard stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


def require_host(endpoint_url: str | None) -> None:
    """Raise `ConfigurationError` for an endpoint that is not a web address.

    Also if its host has no address: requests to it would be retried for long.
    """
    from urllib.request import getproxies  # it loads 30 modules, which `millrace --help` does not need

    if not endpoint_url:
        return
    subject = f"--endpoint-url {printable(endpoint_url.rpartition('@')[2])}"
    try:
        parts = urlsplit(endpoint_url if "://" in endpoint_url else f"https://{endpoint_url}")
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{subject}: not a web address ({error})", next_step="correct the address") from error
    if parts.scheme not in _WEB or parts.netloc.removesuffix(":") in _WEB:  # the second for one slash, as in http:/host
        raise ConfigurationError(f"{subject}: not a web address", next_step="write http://host:port or https://host")
    if not parts.hostname or getproxies():
        return  # a missing host is reported with the other options; a proxy resolves hosts that this machine cannot
    try:
        socket.getaddrinfo(parts.hostname, port or 443)
    except (OSError, ValueError) as error:  # also an invalid host
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"{subject}: the host name has no address ({reason})", next_step="correct the address"
        ) from error


# --- caches and storage -------------------------------------------------------------------------------


def file_system(
    urls: Sequence[str], cache_dir: Sequence[str], endpoint_url: str | None, *, sends_requests: bool = False
) -> MillraceFileSystem:
    """The file system that serves `urls`, with credentials from the environment. All must belong to one storage.

    With `sends_requests`, the command sends requests to the storage, so its host must exist.
    """
    from millrace.filesystem import filesystem
    from millrace.origin import options_for, require_url, split_url

    for url in urls:
        require_url(url)
    schemes = sorted({split_url(url)[0] for url in urls})
    if len(schemes) > 1:
        raise UsageError(f"the URLs belong to {' and '.join(schemes)}", next_step="use one command for each storage")
    options = options_for(urls[0], endpoint_url)
    if sends_requests and options:
        require_host(endpoint_url)
    # Not an instance that fsspec cached: each command reads the environment and the file.
    return filesystem(schemes[0], target_options=options, cache_dir=list(cache_dir) or None, skip_instance_cache=True)


def existing_node(cache_dir: Sequence[str]) -> tuple[CacheNode, list[str]]:
    """The existing cache, and the directories without one. Creates nothing.

    Raises `ConfigurationError` if no directory has a cache, and `StorageError` if none can be used.
    """
    from millrace.cache.node import cache_node, store_exists
    from millrace.cluster.attach import with_node_limits

    options = with_node_limits(resolve({"cache_dir": list(cache_dir) or None}))
    there = tuple(path for path in options.cache_dirs if store_exists(replace(options, cache_dirs=(path,))))
    missing = [str(path) for path in options.cache_dirs if path not in there]
    if not there:
        raise ConfigurationError(
            f"{', '.join(missing)}: no cache",
            next_step="read something through millrace.filesystem first, or name the directory with --cache-dir",
        )
    # Only existing ones: a cache creates the directories that it is given.
    node = cache_node(replace(options, cache_dirs=there))
    if not node.open_disks:
        raise node.unusable()
    return node, missing


def cluster_access(options: CacheOptions, address: str | None) -> ClusterAccess | None:
    """Access to the cluster of the node at `address`, else to the cluster of this machine; None without one."""
    from millrace.filesystem.cluster_access import access_from_here, access_through

    return access_from_here(options) if address is None else access_through(address, options)


def places_of(node: CacheNode, url: str, endpoint_url: str | None) -> tuple[str, list[Place]]:
    """The full URL of `url`, and its places: at every service with objects in this cache, or only at the endpoint.

    Raises `UsageError` for a pattern and for a URL that `require_url` rejects.
    """
    from millrace.cache.catalog import origins
    from millrace.filesystem import filesystem
    from millrace.filesystem.opens import is_pattern
    from millrace.origin import options_for, require_url, split_url

    require_url(url)
    options = options_for(url, endpoint_url)
    named = filesystem(split_url(url)[0], target_options=options, skip_instance_cache=True)
    key = named.key_of(url).rstrip("/")
    if is_pattern(key, named.origin_identity, wildcards="*?"):
        raise UsageError(f"{url!r} is a pattern", next_step="name an object or a prefix")
    full_url = named.unstrip_protocol(url).rstrip("/")
    if endpoint_url:
        return full_url, [(named.origin_identity, key)]
    kind = named.origin_identity.partition("+")[0]
    return full_url, [(origin, key) for origin in sorted(origins(node)) if origin.partition("+")[0] == kind]


# --- output -------------------------------------------------------------------------------------------


SCHEMA_VERSION = 1
"""The version of the JSON output. It changes when a field is removed or gets another meaning, not when one is added."""


def json_text(content: Any) -> str:
    """JSON in one line, with `schema_version` in an object, or in each object of a list (one line each).

    Numbers that JSON lacks (nan, infinities) are null, other values their `repr`.
    """
    if isinstance(content, list):
        return "[" + ",\n ".join(json_text(each) for each in content) + "]"
    versioned = {"schema_version": SCHEMA_VERSION, **content}
    try:
        return json.dumps(versioned, default=repr, allow_nan=False)
    except ValueError:  # one of these numbers
        return json.dumps(json.loads(json.dumps(versioned, default=repr), parse_constant=lambda word: None))


def print_json(content: Any) -> None:
    """Print the result of a command with `--json`: one document on stdout."""
    click.echo(json_text(content))


def print_note(line: str) -> None:
    """Write a remark besides the result in one line to stderr. `millrace --quiet` suppresses it."""
    if not is_quiet():
        print_message(line)


@contextlib.contextmanager
def repeats_noted() -> Iterator[None]:
    """Report once that a request to the storage failed and is repeated, which can take a minute without other output.

    Not in the first seconds: most failures are over by then, or have become the error of the command.
    """
    began = time.monotonic()

    def note(event: Event) -> None:
        if event.name == "origin.request.failed" and time.monotonic() - began >= _LINE_SECONDS:
            remove()
            print_message(
                f"{event.subject}: a request failed, and is repeated for a while; 'millrace -v' shows the reason"
            )

    if is_quiet():
        yield
        return
    remove: Callable[[], None] = add_hook(note)
    try:
        yield
    finally:
        remove()


def is_quiet() -> bool:
    """Whether the command runs with `millrace --quiet`: without progress and remarks."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("quiet"))


def print_message(line: str) -> None:
    """Write an error in one line to stderr."""
    with contextlib.suppress(OSError):  # stderr is closed as well: only the exit code is left
        # A name that is not valid UTF-8 is shown all the same.
        text = f"millrace: {printable(without_queries(line))}".encode("utf-8", "backslashreplace").decode()
        click.echo(text, err=True)


class ProgressLine(abc.ABC):
    """Progress on stderr: a bar on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._is_terminal = is_terminal(sys.stderr)
        self._is_quiet = is_quiet()
        self._next = time.monotonic() + (0.0 if self._is_terminal else _LINE_SECONDS)
        self._is_shown = False

    def is_due(self) -> bool:
        """Whether `show` should be called now."""
        return not self._is_quiet and time.monotonic() >= self._next

    def show(self, text: str, done_bytes: int, total_bytes: int) -> None:
        """Write the line, on a terminal over the previous one, with a bar if there is room for it."""
        if not self._is_terminal:
            self._next += _LINE_SECONDS
            click.echo(text, err=True)
            return
        self._next = time.monotonic() + _BAR_SECONDS
        columns = shutil.get_terminal_size().columns
        room = min(30, columns - len(text) - 4)
        if room >= 5 and total_bytes:
            full = round(room * done_bytes / total_bytes)
            text = f"[{'#' * full}{'.' * (room - full)}] {text}"
        click.echo(f"\r{text[: columns - 1]}\x1b[K", err=True, nl=False)
        self._is_shown = True

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self._is_shown:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._is_shown = False

    @abc.abstractmethod
    def so_far(self) -> str:
        """The progress so far, for the message after an interrupt."""


@contextlib.contextmanager
def shown(display: ProgressLine, *, after: str = "") -> Iterator[None]:
    """Clear the display at the end of the block. An interrupt ends the command with its exit code and one line on stderr.

    The line contains `after`, or the progress so far.
    """
    try:
        with remembered():
            yield
    except KeyboardInterrupt as end:
        display.clear()
        word, code = end.args if len(end.args) == 2 else ("interrupted", 130)
        print_message(f"{word}: {after or display.so_far()}")
        raise click.exceptions.Exit(code) from end
    finally:
        display.clear()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> list[str]:
    """The lines of a table; the columns in `right` are aligned right."""
    lines = [tuple(map(printable, line)) for line in (columns, *rows)]
    widths = [max(_width(line[place]) for line in lines) for place in range(len(columns))]

    def cell(place: int, text: str) -> str:
        gap = " " * (widths[place] - _width(text))
        return gap + text if columns[place] in right else text + gap

    return ["  ".join(cell(place, text) for place, text in enumerate(line)).rstrip() for line in lines]


def _width(text: str) -> int:
    """The columns of a text on a terminal: two for a wide character (Chinese, emoji), none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


# --- numbers and times --------------------------------------------------------------------------------


def counted(number: int, thing: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def time_text(seconds: float) -> str:
    """A duration: `9 s`, `2:05`, `1:02:05`, `3 d`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 86400 or whole % 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 86400} d"


def duration_text(seconds: float) -> str:
    """A duration that was measured, below 10 s with a digit more: `35 ms`, `0.4 s`, `2:05`."""
    if seconds >= 9.95:
        return time_text(seconds)
    return f"{seconds:.1f} s" if seconds >= 0.0995 else f"{1000 * seconds:.0f} ms"
