"""Numbers and traces of a run for other programs: Prometheus, TensorBoard, Weights & Biases, OpenTelemetry."""
