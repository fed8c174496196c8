"""Every setting of a run: its type, where it comes from, and whether it may change."""
