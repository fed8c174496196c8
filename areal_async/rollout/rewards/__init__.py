"""Rewards, run in worker processes that can be killed."""
