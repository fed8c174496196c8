"""Continuous batching of a Hugging Face decoder on one host."""
