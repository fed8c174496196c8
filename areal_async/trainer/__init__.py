"""The trainer: from stored trajectories to the next weights version."""
