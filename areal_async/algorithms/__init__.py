"""Losses and advantages: pure functions of tensors, with no knowledge of where the numbers came from."""
