"""The Hugging Face hub as an origin: files of models, data sets and spaces, always of a commit.

Key terms:
- revision: a branch, tag or commit in a key; resolved to a commit before a read.
- pin: the commit of a revision, used for reads until it is resolved again.
- route: the URL to which the hub redirects for the bytes of a file.

Start reading in `hub_origin.py`, then `client.py`.
"""

from millrace.origin.hub.hub_origin import HubOrigin

__all__ = ["HubOrigin"]
