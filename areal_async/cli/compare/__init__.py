"""``compare``: two versions, models, servers or settings answer the same held-out rows, and how much better one is."""
