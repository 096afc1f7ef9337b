"""What tests, benchmarks and demonstrations of Millrace need, and users of Millrace may need for theirs.

`millrace.testing.s3` runs a real S3 server, `millrace.testing.region` puts the latency, the bandwidth and the faults of
a distant region before it, `millrace.testing.process` is how both keep their processes from outliving their owner.
"""
