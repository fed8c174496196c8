"""What a step leaves: weights versions, checkpoints, the archive."""
