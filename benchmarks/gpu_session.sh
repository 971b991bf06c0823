#!/usr/bin/env bash
# One of the two sessions of `murmur bench gpu` on a machine that is lent for minutes:
#
#   OUT=results PACKAGES=packages benchmarks/gpu_session.sh 1     whole runs of terrain, updates, MASAC, augmentation
#   OUT=results PACKAGES=packages benchmarks/gpu_session.sh 2     spread, acting, equality, tests, precisions, launches
#
# Each ends within six minutes. OUT holds after each topic: topics-session-N.json (also what a topic under way has so
# far), gpu-session-N-DATE-DEVICE.json and .md, session-N.log. The same command on the same machine continues with what is
# missing. PACKAGES is a folder with murmur's dependencies for that machine's Python, without torch; it needs no network.
# PYTHON is the interpreter; further arguments (--topics NAME,… --smoke --seconds S) are passed on.
set -u -o pipefail
session=${1:?1 or 2}
shift
: "${OUT:?the folder for the results}"
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$OUT"
PYTHONPATH="$PWD${PACKAGES:+:$(realpath "$PACKAGES")}${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH PYTHONUNBUFFERED=1
timeout --signal=INT --kill-after=10 355 "${PYTHON:-python3}" -P -m murmur.benchmarks.gpu \
    --session "$session" --out "$OUT" "$@" 2>&1 | tee -a "$OUT/session-$session.log"
