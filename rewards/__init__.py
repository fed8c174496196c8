"""Reward functions, one per file: what a workflow awaits to score an answer."""
