"""Sends a run's record to trackers such as W&B and MLflow, each from a process of its own.

    learner ── progress.jsonl ──> python -m learner_service.telemetry.tracking wandb RUN
                                  python -m learner_service.telemetry.tracking mlflow RUN

The file is the queue: a tracker that is slow, down or refused costs the learner nothing, and what
was not sent is still there to be sent. tracking/<tracker>.json in the run's folder keeps the
tracked run's id and how far it is.
"""
