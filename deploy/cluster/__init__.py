"""The sections `cluster` and `roles` of a run file: machines, groups of GPUs, who runs where. Pure but for reading a model's config.json."""
