"""Functions that may synchronise, and known faults."""

from .report import Fault

# The qualified names of functions, and why each may; with "*" also what they call. Whatever runs
# beside acting waits for events alone: other waits hold up launches of other threads.
_EVENT = ": Event.synchronize"
ALLOWED = {
    "Run._open*": "a run begins: weights and opponents are copied to the device",
    "SupervisedRun._open*": "a run begins: weights are copied to the device",
    "RunContext.finish": "all threads have ended",
    "Learner._means" + _EVENT: "one read of an update's losses",
    "Pace.given" + _EVENT: "learning is a few steps ahead of the device, no more",
    "Report._draw*" + _EVENT: "weights, gradients and actions, at their interval alone",
    "Keeper.save*" + _EVENT: "a checkpoint is written",
    "Report.skipped*" + _EVENT: "a batch is written",
    "KeepOpponents._keep*" + _EVENT: "a past policy is written",
    "Evaluate._offer*" + _EVENT: "the loss's scale is kept",
    "Segmentation.confusion" + _EVENT: "one read of an evaluation's confusion matrix",
    "Segmentation.figures*" + _EVENT: "a few images and masks, at the interval of figures alone",
    "Keeper._write_best*" + _EVENT: "the best policy is written",
    "PackedStaging._arrived*" + _EVENT: "the actions are read",
    "InferenceLoop._remove*" + _EVENT: "a session has ended",
    "InferenceLoop._remove*: creation of an event": "a session has ended",
    "Keeper._write_best*: creation of an event": "the best policy is written",
    "PackedStaging.prepare*: creation of an event": "no row has come yet",
    "PackedStaging._free_buffer*" + _EVENT: "the last copy of the staging memory has left it",
    "_Pinned.fill*" + _EVENT: "the last copy of the staging memory has left it",
    "ReplayStorage._find_transitions" + _EVENT: "once: whether there is a transition to draw",
    "ReplayStorage._find_transitions: creation of an event": "the same",
}

# Faults that remain: (kind, file, function) -> reason.
KNOWN: dict[tuple[str, str, str], str] = {}


def unknown(faults: "list[Fault]") -> list[str]:
    """The faults that are not in KNOWN."""
    return [str(f) for f in faults if (f.kind, f.site.file, f.site.function) not in KNOWN]
