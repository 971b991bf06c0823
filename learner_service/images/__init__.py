"""Images: samples that supply sessions send, and the epochs of batches made of them."""
