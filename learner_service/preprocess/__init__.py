"""Everything that is done to a batch before an algorithm learns from it, or to what it acts on."""
