"""Checkpoints: what a run keeps on disk."""

from murmur.learner_service.checkpoint.contents import (
    buildable_config,
    check_spec,
    load_algorithm,
    saved_config,
    saved_game,
    saved_policy,
    saved_source,
    saved_spec,
    source_text,
    spec_text,
)
from murmur.learner_service.checkpoint.folder import CheckpointFolder

__all__ = [
    "CheckpointFolder",
    "buildable_config",
    "check_spec",
    "load_algorithm",
    "saved_config",
    "saved_game",
    "saved_policy",
    "saved_source",
    "saved_spec",
    "source_text",
    "spec_text",
]
