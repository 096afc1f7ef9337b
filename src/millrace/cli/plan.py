"""`millrace plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.commands import PlainCommand
from millrace.cli.common import F, NumberRange, json_option, print_json, table, time_text
from millrace.cli.rates import ratio_text
from millrace.config import parse_amount
from millrace.errors import ConfigurationError
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.planning import Plan, Workload


def _size(text: str) -> int:
    """Parse a size such as `200GB`. Raises `click.BadParameter`."""
    return _bytes(text, text, "a size such as 200GB")


def _rate(text: str) -> int:
    """Parse a rate such as `2GB/s` into bytes per second. Raises `click.BadParameter`."""
    return _bytes(text.strip().removesuffix("/s"), text, "a rate such as 2GB/s")


def _positive_rate(text: str) -> int:
    """As `_rate`, above zero."""
    if not (rate := _rate(text)):
        raise click.BadParameter(f"{text!r} is not above zero")
    return rate


def _bytes(amount: str, text: str, expected: str) -> int:
    try:
        nbytes = parse_amount(amount, option="").nbytes
    except ConfigurationError:
        nbytes = None
    if nbytes is None:
        raise click.BadParameter(f"{text!r} is not {expected}")
    return nbytes


def _amount(*names: str, kind: Any, metavar: str, text: str, **default: Any) -> Callable[[F], F]:
    """An option with an amount, which is required without `default`. The default "0" stands for no limit."""
    # To click, `default=None` is a value.
    shown = default.get("default", "0") != "0"
    return click.option(
        *names, type=kind, metavar=metavar, help=text, required=not default, show_default=shown, **default
    )


_PRICE = NumberRange(min=0)
_COUNT = click.IntRange(1, 10**9)
_COPIES = click.IntRange(1, 16)


@click.command(cls=PlainCommand)
@_amount("--data", "data_bytes", kind=_size, metavar="SIZE", text="Size of the data set.")
@_amount("--nodes", kind=_COUNT, metavar="N", text="Number of nodes.", default=1)
@_amount("--disk", "disk_bytes", kind=_size, metavar="SIZE", text="Cache capacity of one node.")
@_amount("--epochs", kind=_COUNT, metavar="N", text="Epochs of the job.", default=10)
@_amount("--replicas", kind=_COPIES, metavar="N", text="Nodes that keep each block.", default=1)
@_amount("--origin-rate", kind=_positive_rate, metavar="RATE", text="Storage to one node.", default="1GB/s")
@_amount("--origin-total", kind=_rate, metavar="RATE", text="Storage to all nodes. Default: no limit.", default="0")
@_amount("--disk-rate", kind=_positive_rate, metavar="RATE", text="Disks of one node.", default="2GB/s")
@_amount("--network-rate", kind=_positive_rate, metavar="RATE", text="Other nodes to one node.", default="1GB/s")
@_amount(
    "--train-rate", kind=_rate, metavar="RATE", text="Data that one node trains on. Default: no limit.", default="0"
)
@_amount("--request-size", "request_bytes", kind=_size, metavar="SIZE", text="Mean size of a request.", default="8MiB")
@_amount("--get-price", kind=_PRICE, metavar="PRICE", text="Price of 1,000 requests.", default=0.0004)
@_amount("--transfer-price", kind=_PRICE, metavar="PRICE", text="Price of 1 GB from the storage.", default=0.0)
@_amount("--node-price", kind=_PRICE, metavar="PRICE", text="Price of an hour of one node.", default=0.0)
@json_option
def plan(as_json: bool, **amounts: Any) -> None:
    """Estimate hit ratio, epoch time and cost of a job, with a cache and without.

    The estimate assumes a job that reads all data once in each epoch, in a new order, each node an equal part. It sends no
    request and does not look at this machine. Rates and prices are those of your storage and machines: the defaults are only
    examples.
    """
    from millrace.planning import Workload
    from millrace.planning import plan as planned

    for name, option in (("data_bytes", "--data"), ("request_bytes", "--request-size")):
        if not amounts[name]:
            raise click.UsageError(f"{option} must be positive")
    work = Workload(**amounts)
    result = planned(work)
    if as_json:
        content = asdict(result)
        for name, total in (("total", result.total), ("uncached", result.uncached)):
            content[name]["cost"]["total"] = total.cost.total
        print_json({"workload": asdict(work), **content})
        return
    for line in lines_of(work, result):
        click.echo(line)


def lines_of(work: Workload, result: Plan) -> list[str]:
    """The plan as text: the cache, then the epochs, then all epochs with the cache and without."""
    share = ratio_text(result.cached_share)
    head = (
        f"cache: {size_text(result.capacity_bytes)} on {'1 node holds' if work.nodes == 1 else f'{work.nodes} nodes hold'} "
        f"{share} of {size_text(work.data_bytes)}"
    )
    epochs = [
        f"first epoch: {time_text(result.first.seconds)}{_limit(result.first.limit)}",
        f"later epochs: {time_text(result.later.seconds)}{_limit(result.later.limit)}, hit ratio {share}",
    ]
    both = (result.total, result.uncached)
    columns = ("1 epoch" if work.epochs == 1 else f"{work.epochs} epochs", "with Millrace", "without a cache")
    rows = [
        ("hit ratio", *(ratio_text(each.hit_ratio) for each in both)),
        ("time", *(time_text(each.seconds) for each in both)),
        ("from the storage", *(size_text(each.origin_bytes) for each in both)),
        ("requests", *(f"{each.origin_requests:,}" for each in both)),
        ("cost, in the currency of your prices", *(f"{each.cost.total:,.2f}" for each in both)),
    ]
    return [head, *(epochs if work.epochs > 1 else epochs[:1]), "", *table(columns, rows, right=columns[1:])]


def _limit(name: str) -> str:
    return "" if name == "none" else f", limited by the {name}" if name != "training" else ", limited by training"
