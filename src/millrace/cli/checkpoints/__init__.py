"""`millrace checkpoints`: list, show, verify, compare, export and prune the checkpoints of a run.

Key terms:
- run: the directory with the checkpoints of one training run; each command takes the URL of a run or of one checkpoint.
- step: selects a checkpoint of a run. Without it, the newest complete checkpoint is used.
- torch's own checkpoint: one that torch's writer made. A command's help states if it refuses these.

The commands are thin: `millrace.checkpoint.tools` and `millrace.checkpoint.run` do the work.
Start reading in `common.py` (selecting a checkpoint, tables, progress), then `ls.py` or `show.py`.
"""

from __future__ import annotations

import click

from millrace.cli.checkpoints.diff import diff
from millrace.cli.checkpoints.export import export
from millrace.cli.checkpoints.ls import ls
from millrace.cli.checkpoints.prune import prune
from millrace.cli.checkpoints.show import show
from millrace.cli.checkpoints.verify import verify
from millrace.cli.commands import GroupedCommands


@click.group(cls=GroupedCommands)
def checkpoints() -> None:
    """List, show, verify, compare, export and prune the checkpoints of a run.

    URL is a run (s3://bucket/run, or a local directory) or one checkpoint (s3://bucket/run/step-000000000100). For a run,
    the newest complete checkpoint is used unless --step selects another. Checkpoints of torch's own writer work too,
    unless a command's help excludes them.
    """


for _command in (diff, export, ls, prune, show, verify):
    checkpoints.add_command(_command)
