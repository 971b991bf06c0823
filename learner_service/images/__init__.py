"""Learning from images: samples that supply sessions send, their epochs, and runs on them."""
