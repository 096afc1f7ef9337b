"""`millrace checkpoints`: look at the checkpoints of a run, check, compare, convert and remove them."""

from __future__ import annotations

import click

from millrace.cli.checkpoints.diff import diff
from millrace.cli.checkpoints.export import export
from millrace.cli.checkpoints.ls import ls
from millrace.cli.checkpoints.prune import prune
from millrace.cli.checkpoints.show import show
from millrace.cli.checkpoints.verify import verify


@click.group()
def checkpoints() -> None:
    """Look at the checkpoints of a run, check, compare, convert and remove them.

    URL is a run (s3://bucket/run, or a local directory), of which the newest complete checkpoint is meant unless --step says
    otherwise, or one checkpoint (s3://bucket/run/step-000000000100). A checkpoint of torch's own writer will do, too,
    where not said otherwise.
    """


for _command in (diff, export, ls, prune, show, verify):
    checkpoints.add_command(_command)
