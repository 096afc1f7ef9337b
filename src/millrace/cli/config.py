"""`millrace config show`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.commands import GroupedCommands
from millrace.cli.common import cache_dir_option, columns_text, json_option, print_json

if TYPE_CHECKING:
    from millrace.config import EffectiveOption


@click.group(cls=GroupedCommands)
def config() -> None:
    """Show the configuration of this machine."""


@config.command()
@cache_dir_option
@json_option
def show(cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Show each option with its value and its source: a variable, a file, or the default.

    These are the values that a file system without arguments uses here. A secret is shown as 'set'.
    """
    from millrace.config import effective_options
    from millrace.errors import printable

    options, variables = effective_options({"cache_dir": list(cache_dir) or None}), _variables(os.environ)
    if as_json:
        print_json({"options": [asdict(each) for each in options], "variables": [asdict(each) for each in variables]})
        return
    found = ((each.name, value_text(each.value), each.source) for each in (*options, *variables))
    rows = [("option", "value", "source"), *found]
    for line in columns_text(rows, left=3):
        click.echo(printable(line))


def _variables(environ: Mapping[str, str]) -> list[EffectiveOption]:
    """The variables that are not options of a file system. Raises `ConfigurationError` for an unusable value."""
    from millrace.cache.attribution import job_of
    from millrace.config import EffectiveOption
    from millrace.errors import ConfigurationError
    from millrace.node.measures import Prices

    prices = Prices.of(environ)
    try:
        public = click.BOOL.convert(environ.get("MILLRACE_PUBLIC_METRICS", "").strip() or False, None, None)
    except click.BadParameter as error:
        raise ConfigurationError(
            "MILLRACE_PUBLIC_METRICS is neither true nor false", next_step="write true or false"
        ) from error
    values = {
        "MILLRACE_JOB": job_of(environ) or None,
        "MILLRACE_PRICE_PER_1000_REQUESTS": prices.per_1000_requests,
        "MILLRACE_PRICE_PER_GB": prices.per_gb,
        "MILLRACE_PUBLIC_METRICS": public,
    }
    sources = {name: name if environ.get(name, "").strip() else "default" for name in values}
    if sources["MILLRACE_JOB"] == "default" and values["MILLRACE_JOB"]:
        sources["MILLRACE_JOB"] = "RAY_JOB_ID"
    return [EffectiveOption(name=name, value=value, source=sources[name]) for name, value in values.items()]


def value_text(value: Any) -> str:
    """A value for people: `-` for none, paths separated by commas."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
