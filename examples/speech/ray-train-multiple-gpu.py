"""Fine-tune a speech-to-text model on Common Voice with several workers of a Ray cluster.

    ray job submit --address http://localhost:8265 --working-dir examples/speech -- \\
        python3 ray-train-multiple-gpu.py --data s3://bucket/cv-corpus-11.0-2022-09-21/de --workers 5 --min-workers 2

Every clip of an epoch goes to one of the workers. If a worker or a node is lost, the run restarts from the newest
checkpoint by itself, with --min-workers also on fewer workers.

The credentials and the endpoint of the storage come from the environment of the nodes (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL), from a profile, or from the role of the machines.
"""

import millrace
from finetune.options import parse_settings, protocol_of, run_script, show


def main() -> None:
    """The same as remote-ray.py, except for the number of workers."""
    settings = parse_settings(__doc__)
    # Only now: PyTorch and Transformers take seconds to import, for which --help and a wrong option do not wait.
    from finetune.report import summary
    from finetune.run import fine_tune

    show(f"outputs go to {settings.run}")
    # One cache for all: a node reads from its own disk, then from the node that has the clip, then from the bucket.
    data = millrace.filesystem(protocol_of(settings.data))
    # The log changes while the run lasts, so its cached copy must never be used.
    outputs = millrace.filesystem(protocol_of(settings.run), consistency="always")
    result = fine_tune(settings, data, outputs)
    show(f"done\n\n{summary(result)}")


if __name__ == "__main__":
    run_script(main)
