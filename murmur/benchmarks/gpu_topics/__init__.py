"""The topics of `murmur bench gpu`: each measures a few figures in a process of its own."""
