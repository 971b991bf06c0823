"""The GPU service: server, batcher, inference, storage, algorithms, networks."""

from shared import old_names as old_names
