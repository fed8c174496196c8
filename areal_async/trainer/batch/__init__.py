"""From stored trajectories to the batch of a step: which groups train, their payloads, and their rows."""
