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


def test_received_notices_of_any_subject_stay_bounded() -> None:
    sender, receiver = Notices(), Notices()
    receiver.most = 80
    for number in range(100):
        sender.say("cast", str(number), "text")
    for kind, subject in [
        ("left_out", "notices after 79"),
        *((n.kind, n.subject) for n in sender.all),
    ]:
        receiver.say(kind, subject, "text")
    for number in range(1000, 2000):
        receiver.say("cast", str(number), "text")
    assert len(receiver.take()) <= 80
    assert len(receiver.all) <= 80


def test_a_receiver_also_says_that_it_leaves_notices_out() -> None:
    sender, receiver = Notices(), Notices()
    receiver.most = 80
    for number in range(100):
        sender.say("cast", str(number), "text")
    for notice in sender.all:
        receiver.say(notice.kind, notice.subject, notice.text)
    for number in range(1000, 1100):
        receiver.say("cast", str(number), "text")
    left_out = [notice.subject for notice in receiver.all if notice.kind == "left_out"]
    assert left_out == ["notices after 63", "notices after 79"]
    assert len(receiver.take()) == len(receiver.all) == 80
