"""Checkpoints: what a run keeps on disk."""

from learner_service.checkpoint.contents import (
    check_spec,
    load_algorithm,
    saved_policy,
    saved_source,
    saved_spec,
    source_text,
    spec_text,
)
from learner_service.checkpoint.folder import CheckpointFolder

__all__ = [
    "CheckpointFolder",
    "check_spec",
    "load_algorithm",
    "saved_policy",
    "saved_source",
    "saved_spec",
    "source_text",
    "spec_text",
]
