"""The learning mathematics: pure functions of tensors (docs/algorithms.md)."""
