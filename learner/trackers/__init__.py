"""Metrics for TensorBoard, Weights & Biases and MLflow, each followed in a process of its own."""
