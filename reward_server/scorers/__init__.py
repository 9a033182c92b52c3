"""Built-in scorers, one idea a file: `score(prompt, completion, fields, *, ...)`, and `check(**args)` for what a signature cannot say."""

NAMES = ("code", "exact", "format", "json_schema", "last_number", "length", "math", "overlong", "reasoning_gym", "regex", "repetition")
