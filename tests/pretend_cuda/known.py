"""Functions that may synchronise, and known faults."""

from .report import Fault

# The qualified names of functions, and why each may; with "*" also what they call.
ALLOWED = {
    "Run._open*": "a run begins: weights and opponents are copied to the device",
    "SupervisedRun._open*": "a run begins: weights are copied to the device",
    "Learner._update": "one read of an update's losses",
    "Learner._draw_distributions*": "one copy of weights and actions, at its interval alone",
    "RunProcess.finish": "all threads have ended",
    "Learner.save*": "a checkpoint is written",
    "ActingDuties._keep_opponent*": "a past policy is written",
    "Segmentation.confusion": "one read of the confusion matrix of an evaluation",
    "Segmentation.figures*": "a copy of a few images and masks, at the interval of figures alone",
    "ActingDuties._offer_evaluation*": "the policy's state is kept, should it be the best",
    "Learner._keep_best*": "the best policy is written",
    "PackedStaging._arrived*": "the actions are read",
    "InferenceLoop._remove*": "a session has ended",
    "PackedStaging._free_buffer*": "the last copy of the staging memory has left it",
    "_Pinned.fill*": "the last copy of the staging memory has left it",
    "ReplayStorage._due": "once: whether there is a transition to draw",
}

# Faults that remain: (kind, file, function) -> reason.
KNOWN: dict[tuple[str, str, str], str] = {}


def unknown(faults: "list[Fault]") -> list[str]:
    """The faults that are not in KNOWN."""
    return [str(f) for f in faults if (f.kind, f.site.file, f.site.function) not in KNOWN]
