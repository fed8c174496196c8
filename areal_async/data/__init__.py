"""Rows, from the hub by name, from local files or from Python."""
