"""Fine-tune a speech-to-text model on Common Voice with Ray Data, Ray Train, Transformers and Millrace.

Read the files in this order: `run.py` (starts Ray Train), `network.py` (the network between its workers), `data.py` (clips
to training rows), `preprocessing.py` (features and labels), `models.py` (the model families), `training.py` (the loop of a
worker), `log.py` (what a run records), `report.py` (the report).
"""
