"""Fine-tune a speech-to-text model on Common Voice with one powerful worker of a Ray cluster.

    ray job submit --address http://localhost:8265 --working-dir examples/speech -- \\
        python3 remote-ray.py --data s3://bucket/cv-corpus-11.0-2022-09-21/de --model openai/whisper-tiny

The same script runs on one machine without a cluster: python3 remote-ray.py --data ... --cpu
"""

import millrace
from millrace.demo.speech.arguments import parse_arguments, run_as_script, say
from millrace.demo.speech.run import run_speech
from millrace.demo.summary import summary


def main() -> None:
    """One worker trains; decoding and features are tasks of Ray Data on whatever CPUs the cluster has."""
    arguments = parse_arguments(__doc__, workers=1)
    say(f"outputs go to {arguments.settings.run_url}")
    # The clips leave the bucket once, in the first epoch. The later ones read the disks of the cluster's nodes.
    data = millrace.filesystem(**arguments.data_storage)
    # What comes out changes while the run lasts: nobody may believe an old version of it.
    outputs = millrace.filesystem(**arguments.run_storage, consistency="always")
    result = run_speech(
        arguments.settings,
        data,
        run_fs=outputs,
        checkpoint_options=arguments.checkpoint_options,
        progress=say,
    )
    say(f"done\n\n{summary(result)}")


if __name__ == "__main__":
    run_as_script(main)
