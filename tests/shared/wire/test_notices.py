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


def test_the_last_notice_says_that_others_are_left_out() -> None:
    notices = Notices()
    for number in range(100):
        notices.say("cast", str(number), f"text of {number}")
    given = notices.take()
    assert len(given) == 64
    assert given[62] == Notice("cast", "62", "text of 62")
    assert given[63].text == "63 notices were given; further ones are left out, first: text of 63"
