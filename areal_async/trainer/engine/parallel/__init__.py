"""How the ranks divide a model, and what they say to each other."""
