"""Built-in scorers, one idea a file: `score(prompt, completion, fields, *, ...)`, and `check(**args)` for what a signature cannot say."""

NAMES = ("exact", "last_number", "length", "math", "reasoning_gym", "regex")
