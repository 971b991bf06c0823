"""The conformance kit: plays the learner to find out if an environment server keeps the contract.

docs/wire.md tells the contract and how to use the kit.

    checklist   the contract in sentences, and what was seen of each
    rows        what the rows of one stream must be
    peer        the learner's side of the wire, with connections that can be cut and frozen
    subject     the environment server, where the kit starts it
    examine     what is played, in order
"""
