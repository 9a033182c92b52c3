"""What a process that runs a user's code sees of its service's environment: everything but credentials. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# Whole words of a name: TOKENIZERS_PARALLELISM is no token.
_SECRET_WORDS = {"TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "APIKEY", "AUTH", "COOKIE"}
_URL_WITH_USER = re.compile(r"://[^/@\s]+@")


def scrubbed(environment: Mapping[str, str], *, named: Collection[str] = (), keep: Collection[str] = ()) -> dict[str, str]:
    """The environment without variables that are named as credentials somewhere (`named`), are called like one, or hold a URL with a
    user in it; those in `keep` stay.

    Example: `scrubbed({"PATH": "/bin", "HF_TOKEN": "x"})` is `{"PATH": "/bin"}`.
    """
    return {name: value for name, value in environment.items() if name in keep or not (name in named or _is_secret(name, value))}


def _is_secret(name: str, value: str) -> bool:
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^A-Za-z0-9]+", name.upper())) or bool(_URL_WITH_USER.search(value))
