"""Templates of `murmur new`: for each kind a plug-in, its test and a configuration.

Skeleton and skeleton stand for the name that is asked for.
"""
