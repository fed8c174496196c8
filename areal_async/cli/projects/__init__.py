"""Projects of a user's own: what they begin with."""
