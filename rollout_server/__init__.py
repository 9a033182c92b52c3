"""The rollout server: an engine, an actor that samples for a learner, and a plain generation service."""
