"""The node process: joins the cluster, serves blocks, runs load jobs, drains on a planned leave.

Key terms:
- node process: the process that serves a node's cache to its peers, started by `millrace node run` or as a Ray actor.
- drain: a planned leave that hands the node's blocks to their next owners.
- load job: a preload of URLs that a node runs for a client.

Start reading in `process.py`.
"""
