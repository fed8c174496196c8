"""Images of a conversation: taken in once, counted as tokens, cut into patches. numpy and Pillow, no torch."""
