"""The learner: gateway, trainer ranks, algorithms, weights."""
