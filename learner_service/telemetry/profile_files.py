"""Names by which `murmur profile` asks and the learner answers; without torch."""

FOLDER = "profile"
REQUEST, RUNNING, TRACE = ".request", ".running", ".pt.trace.json.gz"
METADATA = "murmur"  # the trace's own key for what the learner adds to it
NVTX_VARIABLE = "MURMUR_NVTX"  # environment variable: 1: see profiling.nvtx_ranges
