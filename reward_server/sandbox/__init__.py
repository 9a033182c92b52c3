"""Runs a program written by a model where it can do little harm: a process tree with limits, and what isolation the machine permits."""
