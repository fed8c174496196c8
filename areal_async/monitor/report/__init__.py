"""The report of a run, one HTML file that needs nothing beside it, and what a run says at its end."""
