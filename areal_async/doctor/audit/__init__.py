"""Proves or refutes a run's promises from what the run has left."""
