"""Learning from a data set instead of from rollouts."""
