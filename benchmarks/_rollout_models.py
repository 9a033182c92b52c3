"""Models of the rollout benchmarks: random weights of a stated shape with a tokenizer that has a word for every id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SHAPES = {  # vocabulary, hidden, intermediate, layers, heads, key heads, head size
    "tiny": (259, 64, 128, 2, 2, 1, 32),
    "3m": (2048, 256, 512, 4, 4, 2, 64),
    "0.5b": (32_768, 1024, 3072, 28, 16, 8, 128),
}


def random_model(folder: Path, shape: str, *, dtype: torch.dtype, device: str) -> Path:
    """A Qwen3 of this shape; an existing folder is returned as it is."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if (folder / "config.json").is_file():
        return folder
    vocabulary, hidden, inner, layers, heads, key_heads, head = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head,
        max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    _tokenizer(vocabulary, folder)
    return folder


def _tokenizer(vocabulary: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w0").save_pretrained(folder)


def prompts(vocab_size: int, count: int, num_tokens: int, *, seed: int) -> list[list[int]]:
    """Random ids, the same for the same arguments; no two prompts share a prefix block but by chance."""
    generator = torch.Generator().manual_seed(seed)
    table: list[list[int]] = torch.randint(2, vocab_size, (count, num_tokens), generator=generator).tolist()
    return table


def vocab_size_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def transformers_logprobs(folder: Path, samples: list[tuple[list[int], list[int]]], *, device: str, dtype: torch.dtype) -> list[list[float]]:
    """Log-prob of each completion token by one forward pass a sample. samples: (prompt ids, completion ids)."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    found = []
    with torch.inference_mode():
        for prompt, completion in samples:
            logits = model(torch.tensor([[*prompt, *completion]], device=device)).logits[0, len(prompt) - 1 : -1].float()
            rows = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion, device=device)[:, None])[:, 0]
            found.append(rows.tolist())
    del model
    return found
