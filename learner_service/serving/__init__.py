"""The stream side: accepts sessions, batches requests, acts."""
