"""Weights on the learner's side: plan, snapshot, push."""
