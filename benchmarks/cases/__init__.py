"""One module a case; each has a `case`. The harness finds them by itself."""
