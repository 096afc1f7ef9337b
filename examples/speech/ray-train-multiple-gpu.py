"""Fine-tune a speech-to-text model on Common Voice with several workers of a Ray cluster.

    ray job submit --address http://localhost:8265 --working-dir examples/speech -- \\
        python3 ray-train-multiple-gpu.py --data s3://bucket/cv-corpus-11.0-2022-09-21/de --workers 5 --min-workers 2

Every clip of an epoch goes to one of the workers. When a worker or a node is lost, the others wait or go on without it
(--min-workers), from the newest checkpoint, by themselves.
"""

import millrace
from millrace.demo.speech.arguments import parse_arguments, run_as_script, say
from millrace.demo.speech.run import run_speech
from millrace.demo.summary import summary


def main() -> None:
    """The same as remote-ray.py, but for the number of workers."""
    arguments = parse_arguments(__doc__)
    say(f"outputs go to {arguments.settings.run_url}")
    # One cache for all: a node reads from its own disk, else from the node that has the clip, else from the bucket.
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
