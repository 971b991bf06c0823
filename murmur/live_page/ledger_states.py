"""The states of the time ledger as the live page shows them: what happens, and of which kind.

docs/idle-gpu.md has the same table; a test compares the two.
"""

# thread -> state -> (kind, what happens). Kinds have colors: page.css.
STATES: dict[str, dict[str, tuple[str, str]]] = {
    "learner": {
        "start": ("wait", "nothing yet: from the thread's making to its first state"),
        "wait_rows": ("wait", "no update is due: environments or acting are the bottleneck"),
        "wait_ranks": ("wait", "gradients are exchanged, or another learner is waited for"),
        "sample": ("move", "rows are drawn from the replay"),
        "forward": ("update", "the update: losses"),
        "backward": ("update", "the update: gradients"),
        "optimize": ("update", "the update: weights"),
        "synchronize": ("update", "losses are read: on CUDA the host waits for the update to end"),
        "publish": ("duty", "the acting policy gets the new weights"),
        "checkpoint": ("duty", "a checkpoint is written"),
        "evaluate": ("duty", "an evaluation is prepared"),
        "log": ("duty", "progress is logged"),
    },
    "inference": {
        "start": ("wait", "nothing yet: from the thread's making to its first state"),
        "wait_environments": ("wait", "no request is there: the environments are the bottleneck"),
        "wait_learning": (
            "wait",
            "acting is as far ahead of learning as it may be: the update is the bottleneck",
        ),
        "transfer": ("move", "rows are gathered and sent to the device"),
        "store": ("move", "rows are written to their unrolls, episodes counted, actions packed"),
        "act": ("act", "the policy acts"),
        "reply": ("act", "actions are handed to the event loop"),
        "evaluate": ("duty", "the policy under evaluation acts"),
    },
    "grpc": {
        "serve": ("act", "the event loop has the processor"),
        "wait": ("wait", "the event loop waits for messages"),
    },
}
