"""Models that answer batches of (prompt, completion): by a classification head, a token's probability, or a number in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import transformers

from reward_server.models import loading
from reward_server.models.spec import ModelSpec, micro_batches
from reward_server.templates import Template

Answer = float | str  # a score, or why there is none
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class Asked(Protocol):
    """A loaded model."""

    def answers(self, items: Sequence[tuple[str, str]]) -> list[Answer]: ...


def load(spec: ModelSpec, device: str) -> Asked:
    """Raises ValueError in one line."""
    if spec.kind == "classification":
        return Classification(spec, device)
    return YesNo(spec, device) if spec.kind == "yes_no" else Number(spec, device)


class _Batched:
    """Cuts items into forwards that fit, and halves those that do not."""

    left = False  # padding before the text, where the last position is read

    def __init__(self, spec: ModelSpec, auto_class: Any, device: str) -> None:
        self.spec = spec
        self.model, self.tokenizer = loading.load(spec, auto_class, device)
        self.has_template = spec.chat and bool(self.tokenizer.chat_template)

    def texts(self, items: Sequence[tuple[str, str]]) -> list[str]:
        """What the model reads of each item."""
        raise NotImplementedError

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> list[Answer]:
        """One answer for each row."""
        raise NotImplementedError

    def answers(self, items: Sequence[tuple[str, str]]) -> list[Answer]:
        """In order of the items."""
        ids = loading.token_ids(self.tokenizer, self.texts(items), self.has_template)
        answers: list[Answer] = [f"the conversation has {len(each)} tokens, more than max_tokens={self.spec.max_tokens}" for each in ids]
        fitting = [place for place, each in enumerate(ids) if 0 < len(each) <= self.spec.max_tokens]
        for batch in micro_batches([len(ids[place]) for place in fitting], most_items=self.spec.batch_items, most_tokens=self.spec.batch_tokens):
            places = [fitting[each] for each in batch]
            for place, answer in zip(places, self._halved([ids[place] for place in places]), strict=True):
                answers[place] = answer
        return answers

    def _halved(self, ids: list[list[int]]) -> list[Answer]:
        """Forwards until none runs out of memory."""
        try:
            rows, mask = loading.padded(ids, self.tokenizer.pad_token_id, self.model.device, left=self.left)
            with torch.inference_mode():
                return self.forward(rows, mask)
        except torch.OutOfMemoryError:
            if len(ids) == 1:
                return [f"a conversation of {len(ids[0])} tokens does not fit the memory of {self.model.device}; lower max_tokens"]
        torch.cuda.empty_cache()
        return self._halved(ids[: len(ids) // 2]) + self._halved(ids[len(ids) // 2 :])


class Classification(_Batched):
    """Sequence classification: the logit of one label at the last token."""

    def __init__(self, spec: ModelSpec, device: str) -> None:
        super().__init__(spec, transformers.AutoModelForSequenceClassification, device)
        self._label = _label(spec, self.model.config)

    def texts(self, items: Sequence[tuple[str, str]]) -> list[str]:
        return [loading.conversation(self.tokenizer, prompt, completion, self.spec.chat) for prompt, completion in items]

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> list[Answer]:
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        return list(logits[:, self._label].float().tolist())


def _label(spec: ModelSpec, config: Any) -> int:
    """Index of the label that is the score. Raises ValueError where it is not clear."""
    names = {int(index): str(name) for index, name in config.id2label.items()}
    if spec.label is None and config.num_labels == 1:
        return 0
    for index, name in names.items():
        if spec.label in (index, name):
            return index
    raise ValueError(f"label={spec.label!r} is none of the {config.num_labels} labels of {spec.model!r}: {names}; name one, by index or name")


class _Generative(_Batched):
    left = True

    def __init__(self, spec: ModelSpec, device: str) -> None:
        super().__init__(spec, transformers.AutoModelForCausalLM, device)
        self._template = Template(spec.template)

    def texts(self, items: Sequence[tuple[str, str]]) -> list[str]:
        asked = [self._template.text(prompt=prompt, completion=completion) for prompt, completion in items]
        return [loading.conversation(self.tokenizer, each, None, self.spec.chat) for each in asked]


class YesNo(_Generative):
    """P(first word) / (P(first word) + P(second word)) for the next token, 0 to 1."""

    def __init__(self, spec: ModelSpec, device: str) -> None:
        super().__init__(spec, device)
        ids = [self.tokenizer.encode(word, add_special_tokens=False) for word in spec.answers]
        self._ids = [each[0] for each in ids if each]
        if len(set(self._ids)) != 2:
            raise ValueError(f"answers={list(spec.answers)} begin with the same token for {spec.model!r} ({ids}); give two words that differ at their first token")

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> list[Answer]:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits[:, -1].float()
        return list(torch.softmax(logits[:, self._ids], dim=-1)[:, 0].tolist())


class Number(_Generative):
    """The first number that the model writes, greedily, when it lies within bounds."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> list[Answer]:
        written = self.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=self.spec.max_new_tokens, pad_token_id=self.tokenizer.pad_token_id,
            temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        texts = self.tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
        return [self._number(text) for text in texts]

    def _number(self, text: str) -> Answer:
        found = _NUMBER.search(text)
        if found is None or not self.spec.low <= float(found.group()) <= self.spec.high:
            return f"the model wrote {text[:200]!r}, which is no number from {self.spec.low:g} to {self.spec.high:g}"
        return float(found.group())
