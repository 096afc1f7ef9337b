"""Fine-tuning a speech-to-text model on Common Voice with Ray Data and Ray Train.

`millrace.demo.speech.run.run_speech` runs it all; the modules below it import what they need and no more:
`text` and `audio` need numpy only, `data` needs ray, `model` needs torch and transformers, `train` needs all.
"""
