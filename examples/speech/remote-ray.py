"""Fine-tune a speech-to-text model on Common Voice with one powerful worker of a Ray cluster.

    ray job submit --address http://localhost:8265 --working-dir examples/speech -- \\
        python3 remote-ray.py --data s3://bucket/cv-corpus-11.0-2022-09-21/de --model openai/whisper-tiny

The same script runs without a cluster: python3 remote-ray.py --data FOLDER --cpu

The credentials and the endpoint of the storage come from the environment of the nodes (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL), from a profile, or from the role of the machines.
"""

import millrace
from finetune.options import parse_settings, protocol_of, run_script, show


def main() -> None:
    """One worker trains; Ray Data decodes the clips on whatever CPUs the cluster has."""
    settings = parse_settings(__doc__, workers=1)
    # Only now: PyTorch and Transformers take seconds to import, for which --help and a wrong option do not wait.
    from finetune.report import summary
    from finetune.run import fine_tune

    show(f"outputs go to {settings.run}")
    # Each clip leaves the bucket once, in the first epoch. Later epochs read the disks of the cluster's nodes.
    data = millrace.filesystem(protocol_of(settings.data))
    # The log changes while the run lasts, so its cached copy must never be used.
    outputs = millrace.filesystem(protocol_of(settings.run), consistency="always")
    result = fine_tune(settings, data, outputs)
    show(f"done\n\n{summary(result)}")


if __name__ == "__main__":
    run_script(main)
