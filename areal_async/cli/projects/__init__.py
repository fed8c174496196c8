"""Projects of a user's own: what they begin with, and what is known of their runs from Python."""
