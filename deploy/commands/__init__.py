"""The commands of `headrace`, one file a family; deploy/cli.py puts them together."""
