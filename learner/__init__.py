"""The learner: gateway, trainer ranks, algorithms, weights."""

import protos  # noqa: F401  # before grpc is imported anywhere: it turns its fork handlers off
