"""Seeds as other libraries take them."""


def fold_seed(seed: int) -> int:
    """A 63-bit episode seed in 32 bits, which is what libraries take; small seeds stay as they are.

    Two of n episodes share a seed with probability n² / 2³³; then they start alike, no more.
    """
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF
