"""Fine-tuning a speech-to-text model on Common Voice with Ray Data and Ray Train.

`millrace.demo.speech.run.run_speech` runs it all, `millrace.demo.speech.plain.run_plain` the same without Ray. The modules
below them import what they need and no more: `text`, `audio`, `data` and `batches` need numpy and pyarrow, `training` (the
loop) torch, `ray_data`, `ray_worker` and `ray_network` Ray as well; `families` has what differs between models.
"""
