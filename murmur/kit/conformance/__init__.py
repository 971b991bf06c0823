"""The conformance kit: plays the learner to find out if an environment server keeps the contract.

docs/wire.md states the contract, docs/conformance.md how to use the kit.

    checklist     the contracts in sentences, and what was seen of each
    play          acts, limits, and one stream as the kit reads it
    peer          the learner's side of the wire, with connections that can be cut and frozen
    environments  what is played with environments, in order, and what their rows must be
    samples       what is played with a data set, in order
    examine       starts a server, plays, goes away, refuses, looks at what it does, and says so
"""
