"""The reward server: scores completions in killable processes."""
