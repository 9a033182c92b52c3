"""The trainer: one process a rank, from the batch of a policy step to the next published policy."""
