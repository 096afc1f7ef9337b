"""The classes of commands: when they load the library, and how their help is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from millrace.cli.common import repeats_noted
from millrace.cli.interrupts import ended_at_once

MAX_WIDTH = 110
"""The most columns of a help text. A narrower terminal wraps it; no text is cut."""


class PlainCommand(click.Command):
    """A command whose usage errors name it. In some errors click leaves it out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class LibraryCommand(PlainCommand):
    """A command that uses the library, which is loaded when the command begins and not for its help."""

    def invoke(self, ctx: click.Context) -> Any:
        with ended_at_once():
            import millrace.filesystem  # noqa: F401
        if not any(parameter.name == "endpoint_url" for parameter in self.params):
            return super().invoke(ctx)
        with repeats_noted():  # the commands that send requests to a storage
            return super().invoke(ctx)


class GroupedCommands(PlainCommand, click.Group):
    """A group whose help lists its commands in sections, each with its whole first sentence."""

    command_class = LibraryCommand

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections. click's own method cuts a text that does not fit into one line."""
        sections = {"Commands": tuple(sorted(self.commands))} if self._sections is None else self._sections
        for title, names in sections.items():
            rows = [(name, first_sentence(self.commands[name].help or "")) for name in names if name in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def first_sentence(text: str) -> str:
    """The first sentence of a help text, without its period."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\w)\.(?:\s|$)|(?<=[)'%])\.(?:\s|$)", paragraph, maxsplit=1)[0]
