"""The GPU service: server, batcher, inference, storage, algorithms, networks."""
