"""YAML as people mean it."""

from __future__ import annotations

from typing import Any

import pytest

from protos.settings import load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("security: {off: [tls]}", {"security": {"off": ["tls"]}}),  # YAML 1.1: {False: ["tls"]}
        ("yes: no", {"yes": "no"}),
        ("a: true", {"a": True}),
        ("a: False", {"a": False}),
        ("lr: 1e-5", {"lr": 1e-5}),  # YAML 1.1: the word "1e-5"
        ("lr: 1.0e-5", {"lr": 1e-5}),
        ("n: 12", {"n": 12}),
        ("n: -.5", {"n": -0.5}),
        ("n: .inf", {"n": float("inf")}),
        ("a: 1.2.3", {"a": "1.2.3"}),
        ("a: null", {"a": None}),
        ("a: 10.0.0.1:80", {"a": "10.0.0.1:80"}),
        ('{"a": 1.5}', {"a": 1.5}),
    ],
)
def test_words_and_numbers(text: str, value: Any) -> None:
    assert load_yaml(text) == value
