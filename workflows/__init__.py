"""Workflows, one coroutine per file: what is asked of the model and what its answers are worth."""
