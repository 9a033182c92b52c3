"""Which ids have text: padding rows, holes, tokens added beside the vocabulary, and those without a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protos.vocabulary import ids_with_text, ids_without_text


def written(folder: Path, vocabulary: dict[str, int], added: dict[str, int]) -> Path:
    """A tokenizer.json of whole words."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "WordLevel", "vocab": {**vocabulary, **added}, "unk_token": "a"}
    tokens = [{"id": number, "content": text, **flags} for text, number in added.items()]
    rest = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    (folder / "tokenizer.json").write_text(json.dumps({**rest, "added_tokens": tokens, "model": model}))
    return folder


def test_padding_and_holes_have_no_text_and_added_tokens_have(tmp_path: Path) -> None:
    known = ids_with_text(written(tmp_path, {"a": 0, "b": 1, "c": 3}, {"<end>": 5}))
    assert known == {0, 1, 3, 5}
    assert ids_without_text(known, 8) == (2, 4, 6, 7)
    assert ids_without_text(known, 4) == (2,)  # the tokenizer is longer than the model: <end> has no row


def test_two_files_of_different_models_are_told(tmp_path: Path) -> None:
    assert ids_with_text(tmp_path) is None  # no tokenizer.json
    with pytest.raises(ValueError, match="2 ids have none in common with the 4 rows"):
        ids_without_text(frozenset({10, 11}), 4)
