"""One node's cache: which bytes are here, where they lie, and how the missing ones come."""
