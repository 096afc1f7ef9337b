"""`millrace plan`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millrace.cli.commands import PlainCommand
from millrace.cli.common import NumberRange, json_option, print_json, table, time_text
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


_PRICE = NumberRange(min=0)
_COUNT = click.IntRange(1, 10**9)


@click.command(cls=PlainCommand)
@click.option("--data", type=_size, required=True, metavar="SIZE", help="Size of the data set.")
@click.option("--nodes", type=_COUNT, default=1, show_default=True, metavar="N", help="Number of nodes.")
@click.option("--disk", type=_size, required=True, metavar="SIZE", help="Cache capacity of one node.")
@click.option("--epochs", type=_COUNT, default=10, show_default=True, metavar="N", help="Epochs of the job.")
@click.option(
    "--replicas",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    metavar="N",
    help="Nodes that keep each block.",
)
@click.option(
    "--origin-rate",
    type=_positive_rate,
    default="1GB/s",
    show_default=True,
    metavar="RATE",
    help="Storage to one node.",
)
@click.option(
    "--origin-total", type=_rate, default="0", metavar="RATE", help="Storage to all nodes. Default: no limit."
)
@click.option(
    "--disk-rate", type=_positive_rate, default="2GB/s", show_default=True, metavar="RATE", help="Disks of one node."
)
@click.option(
    "--network-rate",
    type=_positive_rate,
    default="1GB/s",
    show_default=True,
    metavar="RATE",
    help="Other nodes to one node.",
)
@click.option(
    "--train-rate", type=_rate, default="0", metavar="RATE", help="Data that one node trains on. Default: no limit."
)
@click.option(
    "--request-size", type=_size, default="8MiB", show_default=True, metavar="SIZE", help="Mean size of a request."
)
@click.option(
    "--get-price", type=_PRICE, metavar="PRICE", default=0.0004, show_default=True, help="Price of 1,000 requests."
)
@click.option(
    "--transfer-price",
    type=_PRICE,
    metavar="PRICE",
    default=0.0,
    show_default=True,
    help="Price of 1 GB from the storage.",
)
@click.option(
    "--node-price", type=_PRICE, metavar="PRICE", default=0.0, show_default=True, help="Price of an hour of one node."
)
@json_option
def plan(
    data: int,
    nodes: int,
    disk: int,
    epochs: int,
    replicas: int,
    origin_rate: int,
    origin_total: int,
    disk_rate: int,
    network_rate: int,
    train_rate: int,
    request_size: int,
    get_price: float,
    transfer_price: float,
    node_price: float,
    as_json: bool,
) -> None:
    """Estimate hit ratio, epoch time and cost of a job, with a cache and without.

    The estimate assumes a job that reads all data once in each epoch, in a new order, each node an equal part. It sends no
    request and does not look at this machine. Rates and prices are those of your storage and machines: the defaults are only
    examples.
    """
    from millrace.planning import Workload
    from millrace.planning import plan as planned

    if not data or not request_size:
        raise click.UsageError(f"{'--request-size' if data else '--data'} must be positive")
    work = Workload(
        data_bytes=data,
        nodes=nodes,
        disk_bytes=disk,
        epochs=epochs,
        replicas=replicas,
        origin_rate=origin_rate,
        origin_total=origin_total,
        disk_rate=disk_rate,
        network_rate=network_rate,
        train_rate=train_rate,
        request_bytes=request_size,
        get_price=get_price,
        transfer_price=transfer_price,
        node_price=node_price,
    )
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
