"""From messages to ids: what was drawn stays, what is new is encoded, and a template that rewrites is seen (faults.md 53, 55)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_server.dialogue import Dialogue
from rollout_server.tokens import Tokens

STOP = 258  # <|im_end|> of the tiny model's 259 byte tokens


@pytest.fixture(scope="module")
def tokens(tiny_model: Path) -> Tokens:
    return Tokens(tiny_model)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(tokens: Tokens, ids: Sequence[int]) -> str:
    return "".join(tokens.piece(token) for token in ids)


def test_a_next_turn_is_the_drawn_ids_and_what_the_template_writes_after_them(tokens: Tokens) -> None:
    d = Dialogue(tokens, template=True)
    first = d.ask([user("3*4")])
    assert written(tokens, first.ids) == "<|im_start|>user\n3*4<|im_end|>\n<|im_start|>assistant\n" and not first.goes_on
    drawn = [*tokens.more_ids("12"), STOP]
    d.answered(first, drawn, assistant("12"))
    second = d.ask([user("3*4"), assistant("12"), user("sure?")])
    assert second.goes_on and list(second.ids[: len(first.ids) + 3]) == [*first.ids, *drawn]
    assert written(tokens, second.ids[len(first.ids) + 3 :]) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"  # one <|im_end|> after 12, the drawn one
    d.answered(second, [*tokens.more_ids("yes"), STOP], assistant("yes"))
    third = d.ask([user("3*4"), assistant("12"), user("sure?"), assistant("yes"), user("ok")])
    assert third.goes_on and third.ids[: len(second.ids)] == second.ids


def test_an_answer_that_was_cut_gets_the_templates_end_as_something_said(tokens: Tokens) -> None:
    d = Dialogue(tokens, template=True)
    first = d.ask([user("a")])
    d.answered(first, tokens.more_ids("bc"), assistant("bc"))
    second = d.ask([user("a"), assistant("bc"), user("d")])
    assert written(tokens, second.ids[len(first.ids) + 2 :]).startswith("<|im_end|>\n<|im_start|>user\nd")


def test_ids_are_kept_where_encoding_their_text_again_would_give_others(tokens: Tokens) -> None:
    # the byte C3 alone is no character: its text is U+FFFD, which encodes to three other bytes
    broken = next(token for token in range(256) if tokens.text([token]) == "�")
    d = Dialogue(tokens, template=True)
    first = d.ask([user("a")])
    text = tokens.text([broken])
    assert tokens.more_ids(text) != [broken]
    d.answered(first, [broken, STOP], assistant(text))
    second = d.ask([user("a"), assistant(text), user("d")])
    assert second.goes_on and second.ids[len(first.ids)] == broken


class Forgetful:
    """Tokens under a template that leaves thoughts out of earlier answers, and writes a beginning-of-sequence token itself."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str:
        parts = [f"<{m['role']}>{str(m['content']).rpartition('</think>')[2] if m['role'] == 'assistant' else m['content']}<|im_end|>" for m in messages]
        return "".join(parts) + "<assistant>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokens, name)


def test_a_template_that_leaves_earlier_thoughts_out_forks(tokens: Tokens) -> None:
    # faults.md 55: turn 1 is P + C with a thought in C; turn 2's text does not begin with P + C
    d = Dialogue(Forgetful(tokens), template=True)
    first = d.ask([user("a")])
    d.answered(first, [*tokens.more_ids("<think>x</think>b"), STOP], assistant("<think>x</think>b"))
    second = d.ask([user("a"), assistant("<think>x</think>b"), user("c")])
    assert not second.goes_on and written(tokens, second.ids) == "<user>a<|im_end|><assistant>b<|im_end|><user>c<|im_end|><assistant>"
    d.answered(second, [*tokens.more_ids("d"), STOP], assistant("d"))
    third = d.ask([user("a"), assistant("<think>x</think>b"), user("c"), assistant("d"), user("e")])
    assert third.goes_on and third.ids[: len(second.ids)] == second.ids  # the template is append-only for answers without a thought


def test_messages_that_were_changed_are_encoded_afresh(tokens: Tokens) -> None:
    d = Dialogue(tokens, template=True)
    first = d.ask([user("a")])
    d.answered(first, [*tokens.more_ids("b"), STOP], assistant("b"))
    for changed in ([user("A"), assistant("b"), user("c")], [user("a"), assistant("B"), user("c")], [user("c")]):
        assert not d.ask(changed).goes_on
    assert not d.ask([user("a"), assistant("b"), user("c")], tools=[{"type": "function"}]).goes_on  # other tools, another prompt


def test_raw_texts_go_one_after_the_other(tokens: Tokens) -> None:
    d = Dialogue(tokens, template=False)
    first = d.ask([user("3*4")])
    d.answered(first, [*tokens.more_ids("12="), STOP], assistant("12="))
    second = d.ask([user("3*4"), assistant("12="), user("12\n")])
    assert written(tokens, second.ids) == "3*412=<|im_end|>12\n"


def test_a_sequence_never_begins_with_two_beginnings(tokens: Tokens, tiny_model: Path) -> None:
    # faults.md 53: a tokenizer that adds one and a template that writes one
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(tiny_model)
    own.bos_token = "<|im_start|>"
    own.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", own.bos_token_id)])
    made = Tokens.__new__(Tokens)
    made._tokenizer = own
    bos = own.bos_token_id
    assert made.first_ids("a", template=False)[:2] == [bos, *made.more_ids("a")]
    assert made.first_ids("<|im_start|>a", template=False) == [bos, *made.more_ids("a")]
    assert made.first_ids("<|im_start|>a", template=True) == [bos, *made.more_ids("a")]
    assert made.first_ids("a", template=True) == made.more_ids("a")


def test_every_end_that_the_models_files_name_ends_an_answer(tiny_model: Path, tmp_path: Path) -> None:
    # faults.md 54: the tokenizer names 258 alone, generation_config.json three
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 258, 9]}))
    assert Tokens(folder).stop_ids == (7, 9, 258)


def test_what_cannot_be_rendered_is_refused(tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="messages is empty"):
        Dialogue(tokens, template=True).ask([])
    with pytest.raises(ValueError, match="render to no tokens"):
        Dialogue(tokens, template=False).ask([user("")])
