"""What tests, benchmarks and demonstrations of Millrace and of its users need: servers and conformance suites.

Key terms:
- local server: a real S3 server on this machine, with new keys (`s3.py`).
- region: a proxy in front of a server, with the latency, the bandwidth and the faults of a distant one (`region.py`).
- helper process: a process that ends with its owner, however the owner ends (`process.py`).
- conformance suite: the tests that every origin, file system or membership backend must pass.

Start reading in `s3.py`, or for a new backend in `conformance/__init__.py`.
"""
