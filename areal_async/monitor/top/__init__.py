"""A live run on one screen."""
