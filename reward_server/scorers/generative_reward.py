"""generative_reward: what a language model answers when it is asked about the completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from reward_server import extras, templates
from reward_server.models.fronts import fronts
from reward_server.models.spec import Dtype, ModelSpec, check_devices
from reward_server.outcome import Unscored

Count = Annotated[int, Field(ge=1)]
ASKS_YES_NO = "Question:\n{{ prompt }}\n\nAnswer:\n{{ completion }}\n\nIs this answer correct? Say Yes or No."
ASKS_NUMBER = "Question:\n{{ prompt }}\n\nAnswer:\n{{ completion }}\n\nHow good is this answer, from 0 (useless) to 10 (perfect)? Say one number only."


async def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    model: str,
    verdict: Literal["yes_no", "number"] = "yes_no",
    template: str = "",
    answers: Annotated[list[str], Field(min_length=2, max_length=2)] = ["Yes", "No"],  # noqa: B006 - read only
    low: float = 0.0,
    high: float = 10.0,
    max_new_tokens: Count = 16,
    devices: list[str] = ["cpu"],  # noqa: B006 - read only
    tensor_parallel: Count = 1,
    dtype: Dtype = "auto",
    max_tokens: Count = 4096,
    batch_items: Count = 64,
    batch_tokens: Count = 65536,
    chat: bool = True,
    threads: Annotated[int, Field(ge=0)] = 0,
    batch_limit_s: Annotated[float, Field(gt=0)] = 120.0,
    trust_remote_code: bool = False,
) -> float | Unscored:
    """yes_no: the probability of answers[0] against answers[1] as the next token, 0 to 1; number: the number it writes, from low to high.

    Example: `{model: some/instruct-model, verdict: yes_no, template: "{{ prompt }} -> {{ completion }}: right?"}`.
    The template is Jinja with prompt and completion; empty takes a plain question. Source: generative verifiers (Zhang et al. 2024,
    "Generative Verifiers: Reward Modeling as Next-Token Prediction", section 3). Limits: no reasoning before the verdict; words must differ at their first token.
    """
    spec = ModelSpec(
        kind=verdict, model=model, devices=tuple(devices), tensor_parallel=tensor_parallel, dtype=dtype, max_tokens=max_tokens, batch_items=batch_items,
        batch_tokens=batch_tokens, chat=chat, template=template or _asked(verdict), answers=(answers[0], answers[1]), max_new_tokens=max_new_tokens, low=low,
        high=high, threads=threads, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    answer = await fronts.of(spec, batch_limit_s).score(prompt, completion)
    return Unscored(answer, "error") if isinstance(answer, str) else answer


def check(**args: Any) -> None:
    """Loads the model on every replica. Raises ValueError for packages, a template, devices or a model that will not do."""
    check_devices(args.get("devices", ["cpu"]), args.get("tensor_parallel", 1))
    templates.Template(args.get("template") or ASKS_YES_NO, names=frozenset({"prompt", "completion"}))
    if not args.get("low", 0.0) < args.get("high", 10.0):
        raise ValueError(f"low={args.get('low', 0.0):g} must be below high={args.get('high', 10.0):g}")
    for module in ("torch", "transformers"):
        extras.installed(module, scorer="generative_reward", extra="reward-model")
    verdict = args.get("verdict", "yes_no")
    fronts.of(ModelSpec.of(verdict, {**args, "template": args.get("template") or _asked(verdict)}), args.get("batch_limit_s", 120.0))


def _asked(verdict: str) -> str:
    return ASKS_YES_NO if verdict == "yes_no" else ASKS_NUMBER
