"""The GPU service: server, batcher, inference, storage, algorithms, networks."""

if __name__ == "learner_service":  # the checkout's root is on sys.path
    from murmur.shared.old_names import hand_over

    hand_over(__name__)
