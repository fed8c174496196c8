"""Numbers of a run in the formats of other programs: Prometheus, TensorBoard, Weights & Biases."""
