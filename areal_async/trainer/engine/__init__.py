"""From packed rows to the next weights: models, optimizer, checkpoints' format."""
