"""Whether a run learns, as its learner said, and as its newest returns say."""

from murmur.learner_service.learning.stagnation import KIND
from murmur.learner_service.telemetry.statistics import Statistics
from murmur.runs.run_folder import RunFolder
from murmur.shared.wire.notices import FILE, read_notices


def learning_lines(run: RunFolder) -> list[str]:
    """Return what the learner said of a run that does not learn, and its returns since then.

    Empty if it learns, or is not judged yet.
    """
    said = [notice.text for notice in read_notices(run.path / FILE) if notice.kind == KIND]
    if not said:
        return []
    last = next(run.newest_records("progress"), {})
    returns = {name: Statistics(**of) for name, of in (last.get("returns") or {}).items()}
    if returns.keys() < {"untrained", "latest"}:
        return said
    latest, untrained = returns["latest"], returns["untrained"]
    if latest.above(untrained):
        return [*said, f"since then it has learned: its last episodes return {latest}"]
    return [*said, f"its last {latest.episodes} episodes still return {latest}"]
