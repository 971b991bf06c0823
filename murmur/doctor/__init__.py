"""The doctor: the cause of an idle device, and what to do about it."""
