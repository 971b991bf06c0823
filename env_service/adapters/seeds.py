"""Conversion of seeds for other libraries."""


def fold_seed(seed: int) -> int:
    """Fold a 63-bit episode seed into the 32 bits that libraries take; small seeds do not change.

    Two of n episodes share a seed with probability n² / 2³³; then they only start alike.
    """
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF
