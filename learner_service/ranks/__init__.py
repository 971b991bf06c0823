"""Several learners of one run: what they share, and how they agree."""

MEETING_VARIABLE = "MURMUR_MEETING_FD"  # of rank 0: a listening socket that the ranks meet on
