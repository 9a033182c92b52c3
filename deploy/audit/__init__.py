"""`headrace audit RUN_DIR`: a second opinion on a run, from its files alone. Imports nothing of the learner."""
