"""The models that need no hub: whole folders, right tokenizers, refused mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deploy.models import tiny
from tests.models import tiny_model_in


def test_a_tiny_model_has_exactly_the_vocabulary_of_its_tokenizer(tiny_model: Path) -> None:
    # 256 bytes and three special tokens: an id above would be sampled and could not be decoded
    assert AutoConfig.from_pretrained(tiny_model).vocab_size == len(AutoTokenizer.from_pretrained(tiny_model)) == 259


def test_a_tiny_model_reads_one_token_a_byte_and_gives_the_text_back(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer("7 + é", add_special_tokens=False).input_ids
    assert len(ids) == 6  # é is two bytes
    assert tokenizer.decode(ids) == "7 + é"


def test_a_tiny_model_has_a_chat_template_that_ends_where_the_answer_begins(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_seed_gives_the_same_model_again_and_another_seed_another(tmp_path: Path) -> None:
    first, again = tiny(tmp_path / "a", seed=3), tiny(tmp_path / "b", seed=3)
    other = tiny(tmp_path / "c", seed=4)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_loads_and_ties_its_head_as_asked(tmp_path: Path, architecture: str, tied: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_in(tmp_path, architecture=architecture, tied=tied))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 259)


def test_making_a_model_leaves_the_random_state_of_the_process_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tiny(tmp_path / "model", seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_maker_that_dies_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_arguments: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr("deploy.models._write_tiny", die)
    with pytest.raises(RuntimeError, match="disk full"):
        tiny(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_heads_that_vllm_cannot_serve_on_a_cpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"head_dim \(16\) must be at least 32"):
        tiny(tmp_path / "model", head_dim=16)


@pytest.mark.slow
def test_smollm2_reads_digit_by_digit_as_it_was_trained(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer("the  512 = 3", add_special_tokens=False).input_ids
    assert [tokenizer.decode([token]) for token in ids] == ["the", "  ", "5", "1", "2", " =", " ", "3"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
