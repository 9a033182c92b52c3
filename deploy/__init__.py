"""The command line, the run file and the launchers."""

import protos  # noqa: F401  # before grpc is imported anywhere: it turns its fork handlers off

__version__ = "0.1.0"
