"""What a forward pass computes and what is kept of it: layers, keys and values, and the tokens they are of."""
