"""The wire: specs, time steps, codecs, seeds, channels and credentials."""
