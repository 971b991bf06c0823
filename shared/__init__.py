"""The contract of both services: wire, specs, configuration. Never imports torch."""

if __name__ == "shared":  # the checkout's root is on sys.path
    from murmur.shared.old_names import hand_over

    hand_over(__name__)
