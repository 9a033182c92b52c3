"""Prompts: read whole, ordered by a pure function of the position, rendered as the model's publisher expects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from learner.data_config import SourceConfig
from learner.gateway.chat_template import ChatTemplate
from learner.gateway.prompts import Prompt, PromptOrder, PromptSet, check_fingerprint, load_prompts
from learner.gateway.rendering import Renderer, max_model_tokens, max_new_tokens, render_all, stop_ids


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def chat(*contents: str) -> Prompt:
    messages = tuple({"role": "user" if index % 2 == 0 else "assistant", "content": content} for index, content in enumerate(contents))
    return Prompt(prompt_id="1", text=contents[-1], messages=messages, fields={})


def model(folder: Path, *, template: str | None = None, adds_bos: bool = False, bos: bool = True, **config: Any) -> Path:
    """A folder with a tokenizer of whole words: <s> 0, </s> 1, then a to j and "user:" from 2."""
    folder.mkdir(exist_ok=True)
    words = ["<s>", "</s>", *"abcdefghij", "user:", "system:", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": {"content": "</s>"}, **({"bos_token": "<s>"} if bos else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **({"chat_template": template} if template else {})}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WITH_BOS = "{{ bos_token }}{% for m in messages %} {{ m['role'] }}: {{ m['content'] }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %} {{ m['role'] }}: {{ m['content'] }}{% endfor %}"

# Reading


def test_a_line_becomes_a_prompt_with_its_other_fields_for_scorers(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "1+1", "answer": "2", "key": 7}, "", {"question": "2+2", "answer": "4", "key": "x"})
    prompts = load_prompts(path, SourceConfig(prompt_field="question", id_field="key", suffix=" ?"))
    assert len(prompts) == 2
    assert prompts[0] == Prompt(prompt_id="7", text="1+1 ?", messages=({"role": "user", "content": "1+1 ?"},), fields={"answer": "2", "key": 7})
    assert prompts[1].prompt_id == "x"


def test_without_an_id_field_the_line_number_is_the_id(tmp_path: Path) -> None:
    assert [prompt.prompt_id for prompt in load_prompts(written(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}))] == ["1", "3"]


def test_a_list_of_messages_is_a_prompt(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (prompt,) = load_prompts(written(tmp_path, {"prompt": messages}), SourceConfig(suffix="ignored"))
    assert prompt.messages == tuple(messages) and prompt.text == "u"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"line 2: not JSON .* one JSON object a line"),
        ("[1]", r"line 2: a JSON list, not an object"),
        ({"question": "x"}, r"line 2: no field 'prompt' \(it has 'question'\); name the field with data.prompt_field"),
        ({"prompt": ""}, r"line 2: field 'prompt' is an empty string"),
        ({"prompt": 3}, r"line 2: field 'prompt' is a int; give a string"),
        ({"prompt": []}, r"line 2: field 'prompt' is a list; .* not empty"),
        ({"prompt": [{"role": "user"}]}, r"line 2: message 0 of field 'prompt'"),
        ({"prompt": "x", "id": None}, r"line 2: id field 'id' is None; give a string or an integer"),
        ({"prompt": "x", "id": "one"}, r"line 2: id 'one' was used on line 1 already; ids must be unique"),
    ],
)
def test_a_bad_line_is_named_with_field_and_way_out(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_prompts(written(tmp_path, {"prompt": "a", "id": "one"}, line), SourceConfig(id_field="id"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ('"answer": 9007199254740993', "9007199254740993 lies beyond 2**53"),  # 2**53 + 1: a double holds 2**53
        ('"answer": {"parts": [1, -1%s]}' % ("0" * 400), "lies beyond 2**53"),  # no double at all
        ('"answer": "\\ud800"', "half of a surrogate pair"),
    ],
)
def test_a_field_that_would_reach_the_scorer_as_something_else_is_refused(tmp_path: Path, fields: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a", "answer": 9007199254740992}}\n{{"prompt": "b", {fields}}}\n')
    with pytest.raises(ValueError, match="line 2") as caught:
        load_prompts(file)
    assert words in str(caught.value) and len(str(caught.value)) < 500


def test_an_id_beyond_a_double_is_kept_as_text(tmp_path: Path) -> None:
    (prompt,) = load_prompts(written(tmp_path, {"prompt": "a", "id": 2**60 + 1}), SourceConfig(id_field="id"))
    assert prompt.prompt_id == prompt.fields["id"] == "1152921504606846977"


def test_no_file_and_no_prompts_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; give a JSONL or Parquet file"):
        load_prompts(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(written(tmp_path, ""))


def test_another_data_set_has_another_fingerprint_and_a_run_refuses_it(tmp_path: Path) -> None:
    # faults.md 114
    one = load_prompts(written(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b"}))
    same = load_prompts(written(tmp_path, {"answer": 1, "prompt": "a"}, {"prompt": "b"}))
    assert one.fingerprint == same.fingerprint
    for lines in ([{"prompt": "a", "answer": 2}, {"prompt": "b"}], [{"prompt": "b"}, {"prompt": "a", "answer": 1}], [{"prompt": "a", "answer": 1}]):
        other = load_prompts(written(tmp_path, *lines))
        with pytest.raises(ValueError, match=r"fingerprint .* began with .* start a new run folder"):
            check_fingerprint(one.fingerprint, other.fingerprint, "here")
    check_fingerprint(one.fingerprint, same.fingerprint, "here")


# Order


def test_the_order_without_shuffle_is_the_files_and_ends_after_the_last_epoch() -> None:
    order = PromptOrder(num_rows=3, seed=0, shuffle=False, epochs=2)
    assert [order.row(position) for position in range(8)] == [0, 1, 2, 0, 1, 2, None, None]


def test_each_epoch_is_one_whole_permutation_of_its_own() -> None:
    order = PromptOrder(num_rows=50, seed=1, shuffle=True, epochs=None)
    first, second = ([order.row(epoch * 50 + index) for index in range(50)] for epoch in (0, 1))
    assert set(first) == set(second) == set(range(50)) and len(first) == len(second) == 50
    assert first != second and first != list(range(50))
    assert [PromptOrder(num_rows=50, seed=2, shuffle=True, epochs=None).row(index) for index in range(50)] != first


def test_a_restart_goes_on_with_the_next_position_since_order_is_a_function_of_it() -> None:
    # faults.md 114: the next one is the saved one + 1
    before = PromptOrder(num_rows=5, seed=3, shuffle=True, epochs=None)
    drawn = [before.row(position) for position in range(7)]
    after = PromptOrder(num_rows=5, seed=3, shuffle=True, epochs=None)
    assert [*drawn, after.row(7)] == [after.row(position) for position in range(8)]


def test_the_order_is_the_same_in_every_version_of_the_program() -> None:
    """Recorded once; another order would send a resumed run to other prompts."""
    assert [PromptOrder(num_rows=6, seed=0, shuffle=True, epochs=1).row(index) for index in range(6)] == [2, 3, 1, 0, 5, 4]


# Rendering


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_template_that_writes_bos_gives_exactly_one(tmp_path: Path, adds_bos: bool) -> None:
    renderer = Renderer(model(tmp_path / "m", template=WITH_BOS, adds_bos=adds_bos))
    assert renderer.ids([chat("a b")]) == [(0, 12, 2, 3)]


def test_a_doubled_bos_is_one(tmp_path: Path) -> None:
    renderer = Renderer(model(tmp_path / "m", template="{{ bos_token }} " + WITH_BOS))
    assert renderer.ids([chat("a")]) == [(0, 12, 2)]


@pytest.mark.parametrize(("text", "adds_bos", "ids"), [("a b", True, (0, 2, 3)), ("<s> a b", True, (0, 2, 3)), ("a b", False, (2, 3))])
def test_a_raw_prompt_has_one_bos_where_the_tokenizer_adds_one(tmp_path: Path, text: str, adds_bos: bool, ids: tuple[int, ...]) -> None:
    renderer = Renderer(model(tmp_path / "m", adds_bos=adds_bos), template="raw")
    assert renderer.ids([chat(text)]) == [ids]


def test_a_template_without_bos_is_trusted(tmp_path: Path) -> None:
    assert Renderer(model(tmp_path / "m", template=WITHOUT_BOS, adds_bos=True)).ids([chat("a")]) == [(12, 2)]


def test_the_system_message_goes_first_unless_the_chat_has_its_own(tmp_path: Path) -> None:
    renderer = Renderer(model(tmp_path / "m", template=WITHOUT_BOS), system="j")
    own = Prompt(prompt_id="1", text="a", messages=({"role": "system", "content": "i"}, {"role": "user", "content": "a"}), fields={})
    assert renderer.text(chat("a")) == " system: j user: a"
    assert renderer.text(own) == " system: i user: a"


def test_what_cannot_be_rendered_is_the_users_mistake(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    with pytest.raises(ValueError, match="has no chat template .* use data.template=raw"):
        Renderer(folder)
    with pytest.raises(ValueError, match="no place for a system message"):
        Renderer(folder, template="raw", system="x")
    with pytest.raises(ValueError, match="list of 3 chat messages with data.template=raw"):
        Renderer(folder, template="raw").ids([chat("a", "b", "c")])
    with pytest.raises(ValueError, match="renders to no tokens at all"):
        Renderer(folder, template="raw").ids([chat(" ")])
    refusing = model(tmp_path / "r", template="{{ raise_exception('only one turn') }}")
    with pytest.raises(ValueError, match="refuses this prompt: only one turn"):
        Renderer(refusing).ids([chat("a")])
    with pytest.raises(ValueError, match="is not a Jinja template"):
        Renderer(model(tmp_path / "j", template="{% if %}"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        Renderer(folder, template="raw")


def test_a_prompt_one_below_the_models_length_may_draw_one_token_and_longer_ones_are_overlong(tmp_path: Path) -> None:
    # faults.md 75: a model of 10; 9 may draw one token, 10 and 11 are left out and counted
    renderer = Renderer(model(tmp_path / "m"), template="raw")
    by_length = {9: "nine", 10: "ten", 11: "eleven"}
    prompts = PromptSet(
        [Prompt(prompt_id=name, text=" ".join("a" * n), messages=({"role": "user", "content": " ".join("a" * n)},), fields={}) for n, name in by_length.items()]
    )
    with pytest.raises(ValueError, match=r"2 of 3 prompts are over the limit of 9 prompt tokens .*the first is 'ten' with 10; .* data.overlong=drop"):
        render_all(renderer, prompts, max_model_tokens=10)
    rendered = render_all(renderer, prompts, max_model_tokens=10, overlong="drop")
    assert [prompt.prompt_id for prompt in rendered.prompts] == ["nine"] and rendered.dropped == {"ten": 10, "eleven": 11}
    assert max_new_tokens(len(rendered.token_ids[0]), wanted=256, max_model_tokens=10) == 1
    assert max_new_tokens(3, wanted=5, max_model_tokens=10) == 5
    with pytest.raises(ValueError, match="all 3 prompts are over the limit of 4"):
        render_all(renderer, prompts, max_model_tokens=10, max_prompt_tokens=4, overlong="drop")


def test_every_stop_id_that_any_file_names_is_found(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", eos_token_id=32000)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [32007, 32001, 32000]}))
    assert stop_ids(folder) == (1, 32000, 32001, 32007)
    assert stop_ids(model(tmp_path / "n", text_config={"eos_token_id": 5})) == (1, 5)


def test_the_models_length_is_read_where_it_stands(tmp_path: Path) -> None:
    assert max_model_tokens(model(tmp_path / "a", max_position_embeddings=128)) == 128
    assert max_model_tokens(model(tmp_path / "b", text_config={"max_position_embeddings": 64})) == 64
    assert max_model_tokens(model(tmp_path / "c")) is None


def test_templates_may_use_what_publishers_use(tmp_path: Path) -> None:
    source = """{%- for m in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- generation %}{{ m | tojson }}{% endgeneration %}
{%- endfor %}{% if add_generation_prompt %}>{{ strftime_now('%Y')[:2] }}{% endif %}"""
    folder = model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(source)
    text = ChatTemplate(folder).render([{"role": "user", "content": "<ä>"}] * 3)
    assert text == '{"role": "user", "content": "<ä>"}' * 2 + ">20"


def test_rendering_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, learner.gateway.rendering, learner.gateway.ledger, learner.gateway.journal; print(*{'torch', 'transformers', 'grpc', 'google', 'protos.rpc'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_ids_are_those_that_transformers_gives(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    conversation = chat("How many r in strawberry?", "three", "Are you sure? <b>ü</b>\n")
    renderer = Renderer(tiny_model, system="You count.")
    expected = tokenizer.apply_chat_template([{"role": "system", "content": "You count."}, *conversation.messages], add_generation_prompt=True)["input_ids"]
    assert renderer.ids([conversation]) == [tuple(expected)]
    raw = chat("2 + 2 =")
    assert Renderer(tiny_model, template="raw").ids([raw]) == [tuple(tokenizer("2 + 2 =")["input_ids"])]
