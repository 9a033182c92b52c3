"""Configurations are read as YAML says, but for a key that stands twice."""

from __future__ import annotations

import pytest
import yaml

from protos import yaml_text


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "scorers: []\nworkers: 2\nscorers: []\n", "a: {b: [{c: 1, c: 1}]}", '{"a": 1, "a": 2}', "{1: a, 1: b}", "{true: a, True: b}"])
def test_a_key_that_stands_twice_is_a_mistake_with_its_place(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="stands twice in one mapping") as caught:
        yaml_text.read(text)
    assert "line " in str(caught.value)


def test_everything_else_is_what_the_safe_reader_makes_of_it() -> None:
    text = "base: &base {a: 1, b: 2}\nown: {<<: *base, a: 3}\nlist: [1, 1, {a: 1}, {a: 1}]\nnone:\ndate: 2024-01-01\n"
    assert yaml_text.read(text) == yaml.safe_load(text)
    assert yaml_text.read(text)["own"] == {"a": 3, "b": 2}
    for bad in ("!!python/object/apply:os.system [true]", "a: b: c", "--- 1\n--- 2"):
        with pytest.raises(yaml.YAMLError):
            yaml_text.read(bad)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("security: {off: [tls]}", {"security": {"off": ["tls"]}}),  # YAML 1.1: {False: ["tls"]}
        ("yes: no", {"yes": "no"}),
        ("a: False", {"a": False}),
        ("lr: 1e-5", {"lr": 1e-5}),  # YAML 1.1: the word "1e-5"
        ("lr: 1.0e-5", {"lr": 1e-5}),
        ("n: 12", {"n": 12}),
        ("n: -.5", {"n": -0.5}),
        ("n: .inf", {"n": float("inf")}),
        ("a: 1.2.3", {"a": "1.2.3"}),
        ("a: 10.0.0.1:80", {"a": "10.0.0.1:80"}),
    ],
)
def test_words_and_numbers_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert yaml_text.read(text) == value
