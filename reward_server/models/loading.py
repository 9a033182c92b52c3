"""Model and tokenizer of a replica, on its device, or split over several by the model's own tensor-parallel plan."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from reward_server.models.spec import ModelSpec


def load(spec: ModelSpec, auto_class: Any, device: str) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer). Raises ValueError naming what is wrong with the model."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
        config = transformers.AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model={spec.model!r} cannot be read: {_first_line(error)}; give a Hugging Face folder or a hub id") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id  # classifiers look for the last token that is no padding
    split = {} if spec.tensor_parallel == 1 else {"tp_plan": "auto"}
    if split:
        _check_plan(spec, config)
    model, told = auto_class.from_pretrained(
        spec.model, config=config, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code, output_loading_info=True, **split
    )
    if told["missing_keys"]:
        raise ValueError(f"model={spec.model!r} has no weights for {', '.join(sorted(told['missing_keys'])[:3])}: it is no {auto_class.__name__.removeprefix('AutoModelFor')} model, and would answer at random; give one that was trained as such")
    return (model if split else model.to(device)).eval(), tokenizer


def _check_plan(spec: ModelSpec, config: Any) -> None:
    """Raises ValueError where the model's class does not say how it is split, or its heads cannot be."""
    text = config.get_text_config()
    if not getattr(config, "base_model_tp_plan", None) and not getattr(text, "base_model_tp_plan", None):
        raise ValueError(f"tensor_parallel={spec.tensor_parallel}: transformers {transformers.__version__} has no tensor-parallel plan for {type(config).__name__}; use tensor_parallel=1")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % spec.tensor_parallel:
        raise ValueError(f"tensor_parallel={spec.tensor_parallel} does not divide the {heads} key-value heads of {spec.model!r}; use a divisor")


def conversation(tokenizer: Any, prompt: str, completion: str | None, chat: bool) -> str:
    """The text that the model reads; completion None: up to where an answer would begin."""
    if not chat or not tokenizer.chat_template:
        return prompt + (completion or "")
    messages = [{"role": "user", "content": prompt}]
    if completion is not None:
        messages.append({"role": "assistant", "content": completion})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=completion is None)
    return text


def token_ids(tokenizer: Any, texts: list[str], has_template: bool) -> list[list[int]]:
    """Ids of each text; a template has written the special tokens already."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=not has_template)["input_ids"]
    return ids


def padded(ids: list[list[int]], pad: int, device: torch.device, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both int64 [items, longest]."""
    longest = max(map(len, ids))
    rows = torch.full((len(ids), longest), pad, dtype=torch.int64)
    mask = torch.zeros((len(ids), longest), dtype=torch.int64)
    for row, each in enumerate(ids):
        place = slice(longest - len(each), longest) if left else slice(0, len(each))
        rows[row, place] = torch.tensor(each, dtype=torch.int64)
        mask[row, place] = 1
    return rows.to(device), mask.to(device)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
