"""The command line, the run file and the launchers."""

__version__ = "0.1.0"
