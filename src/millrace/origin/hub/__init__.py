"""The Hugging Face hub as an origin: files of models, data sets and spaces, always of a commit."""

from millrace.origin.hub.hub_origin import HubOrigin

__all__ = ["HubOrigin"]
