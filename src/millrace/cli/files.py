"""`millrace files`."""

from __future__ import annotations

import click

from millrace.cli.commands import LibraryCommand
from millrace.cli.common import (
    cache_dir_option,
    counted,
    duration_text,
    endpoint_option,
    file_system,
    json_option,
    print_json,
)
from millrace.cli.load import loading
from millrace.figures import size_text


@click.command(cls=LibraryCommand)
@click.argument("url", metavar="URL")
@click.argument("directory", metavar="DIRECTORY")
@click.option("--copy", is_flag=True, help="Copy every file; DIRECTORY may then be on any file system.")
@cache_dir_option
@endpoint_option
@json_option
def files(
    url: str, directory: str, copy: bool, cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool
) -> None:
    """Make a directory of read-only files with cached objects, for programs that read files.

    URL is an object, a prefix or a quoted pattern, as for 'millrace load', which first loads the objects that are not cached
    on this machine. DIRECTORY is new or empty, and on the file system of the cache: files above 1 MiB are hard links to
    those of the cache, and take no more space. Every file is complete and verified, and does not change when its object
    does.

    The objects stay in the cache, and are not evicted, until DIRECTORY is deleted (rm -r).

    Exit code 3: the cache is full, and not everything is in it; DIRECTORY is then removed.
    """
    from millrace.filesystem.folders import LocalFolder

    fs = file_system([url], cache_dir, endpoint_url, sends_requests=True)

    with loading() as display, LocalFolder(fs, url, directory=directory, copy=copy, progress=display) as made:
        seconds = 0.0 if display.last is None else display.last.seconds
    if as_json:
        print_json(
            {
                "directory": made.path,
                "objects": made.objects,
                "linked_bytes": made.linked_bytes,
                "copied_bytes": made.copied_bytes,
                "fetched_bytes": made.fetched_bytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    click.echo(
        f"{made.path}: {counted(made.objects, 'file')}, {size_text(made.linked_bytes)} linked and "
        f"{size_text(made.copied_bytes)} copied; {size_text(made.fetched_bytes)} fetched in {duration_text(seconds)}"
    )
