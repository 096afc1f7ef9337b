"""Reading: load plans, decoded values, checkpoints of torch's own writer.

Key terms:
- load plan: the list of values to read, made by a planner of torch's interface.
- box: a part of a tensor, by offsets and lengths per dimension.
- stock checkpoint: a checkpoint of torch's own writer.

Start reading in `reader.py` (the interface of `dcp.load`), then `loads.py` (how a plan is carried out). `contents.py` and
`opening.py` read plain bytes for exports and comparisons. `stock.py` reads stock checkpoints.
"""
