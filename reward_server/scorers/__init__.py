"""Built-in scorers, one idea a file: `score(prompt, completion, fields, *, ...)`, and `check(**args)` for what a signature cannot say."""

NAMES = ("code", "exact", "format", "generative_reward", "json_schema", "last_number", "length", "math", "overlong", "reasoning_gym", "regex", "repetition", "reward_model")
OWN_PROCESS = frozenset({"generative_reward", "reward_model"})  # hold a model: one process each, which serves all calls
