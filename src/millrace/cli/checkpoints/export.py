"""`millrace checkpoints export`."""

from __future__ import annotations

from dataclasses import asdict

import click

from millrace.cli.checkpoints.common import (
    Display,
    checkpoint_url,
    keys_option,
    options_of,
    step_option,
    threads_option,
    trust_option,
    trusted_types,
)
from millrace.cli.commands import LibraryCommand
from millrace.cli.common import counted, duration_text, endpoint_option, json_option, print_json, shown
from millrace.config import parse_amount
from millrace.errors import ConfigurationError, printable
from millrace.figures import listed, size_text

_KEYS = 5


def _bytes_of(size: str) -> int:
    nbytes = parse_amount(size, option="--shard-size").nbytes
    if not nbytes:
        raise ConfigurationError(f"--shard-size {size}", next_step="give a size such as 5GB")
    return nbytes


@click.command(cls=LibraryCommand)
@click.argument("url")
@click.argument("target")
@click.option(
    "--to",
    type=click.Choice(["torch", "safetensors", "dcp"]),
    required=True,
    help="torch: a file for torch.load; safetensors: a file of tensors; dcp: a directory for torch.distributed.checkpoint.",
)
@step_option
@keys_option
@click.option(
    "--strip-prefix",
    default="",
    metavar="TEXT",
    help="For safetensors: only keys with this prefix, which is removed.",
)
@click.option(
    "--rename",
    multiple=True,
    metavar="PATTERN=NAME",
    help=r"For safetensors: rename keys that match a regular expression, as in 'model\.(.*)=\1'. Can be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "float16", "bfloat16"]),
    help="For safetensors: convert floating-point tensors. Needs torch.",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    help="For safetensors: TARGET is a directory of files of this size, such as 5GB, with an index for transformers.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing TARGET.")
@trust_option
@threads_option
@endpoint_option
@json_option
def export(
    url: str,
    target: str,
    to: str,
    step: int | None,
    keys: tuple[str, ...],
    strip_prefix: str,
    rename: tuple[str, ...],
    dtype: str | None,
    shard_size: str | None,
    overwrite: bool,
    trust: tuple[str, ...],
    threads: int | None,
    endpoint_url: str | None,
    as_json: bool,
) -> None:
    """Export a checkpoint to TARGET, bit for bit, in a format that other programs read.

    URL may also be a Hugging Face directory. TARGET is a file, or with --to dcp or --shard-size a directory; a local path or
    a URL. It appears when it is complete. An export to torch needs memory for all values, the other formats for the largest
    tensor.
    """
    from millrace.checkpoint.tools.exports import EXPORT_FORMATS, export_checkpoint

    place = checkpoint_url(url, step, endpoint_url)
    display = Display("exported")
    with shown(display):
        report = export_checkpoint(
            place,
            target,
            next(name for name in EXPORT_FORMATS if name == to),
            keys=keys,
            strip_prefix=strip_prefix,
            rename=rename,
            dtype=dtype,
            shard_bytes=None if shard_size is None else _bytes_of(shard_size),
            overwrite=overwrite,
            target_options=options_of(place, endpoint_url),
            output_options=options_of(target, endpoint_url),
            threads=threads,
            trusted_types=trusted_types(trust),
            progress=display,
        )
    if as_json:
        print_json(asdict(report))
        return
    objects = f" and {counted(report.objects, 'object')}" if report.objects else ""
    click.echo(
        f"exported {counted(report.tensors, 'tensor')}{objects}, {size_text(report.raw_bytes)}, of {report.url} to "
        f"{report.target} ({duration_text(report.seconds)})"
    )
    if report.left_out:
        click.echo(printable(f"left out: {listed(report.left_out, _KEYS)}"))
