"""What a node does with its servers: it starts them, keeps each on the newest announced weights, and repairs them."""
