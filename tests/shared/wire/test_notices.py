from murmur.shared.wire.notices import Notice, Notices


def test_a_notice_is_said_once_per_kind_and_subject() -> None:
    notices = Notices()
    notices.say("cast", "observation", "'observation'\nloses digits")
    notices.say("cast", "observation", "again")
    notices.say("cast", "reward", "another subject")
    assert notices.said("cast", "observation")
    assert not notices.said("axes_guessed", "observation")
    assert notices.take() == [
        Notice("cast", "observation", "'observation' loses digits"),
        Notice("cast", "reward", "another subject"),
    ]
    assert notices.take() == []


def test_notices_are_bounded_and_the_rest_counted() -> None:
    notices = Notices()
    for number in range(100):
        notices.say("cast", str(number), "text")
    assert len(notices.take()) == 64
    assert notices.dropped == 36
