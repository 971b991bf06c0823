"""Options and statuses that both sides of a stream agree on."""

from examples.environment_server import FINAL as OF_THE_EXAMPLE
from murmur.shared.wire.channel import FINAL


def test_final_statuses_are_those_of_the_example_client() -> None:
    """Workers and the conformance kit read one list: a missing status would escape both."""
    assert set(FINAL) == OF_THE_EXAMPLE
