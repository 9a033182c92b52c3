"""What is wrong with a machine, a run file, or a run folder."""
