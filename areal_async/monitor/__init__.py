"""What a person looks at: a run's numbers, trajectories and screens."""
