"""The rollout server: an engine, an actor that samples for a learner, and a plain generation service."""

import protos  # noqa: F401  # before grpc is imported anywhere: it turns its fork handlers off
