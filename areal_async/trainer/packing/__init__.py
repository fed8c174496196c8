"""Sequences as packed rows, and what they cost."""
