"""The command line, the run file and the launchers."""
