"""reward_model: what a Hugging Face sequence-classification model says of the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from reward_server import extras
from reward_server.models.fronts import fronts
from reward_server.models.spec import Dtype, ModelSpec, check_devices
from reward_server.outcome import Unscored

Count = Annotated[int, Field(ge=1)]


async def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    model: str,
    devices: list[str] = ["cpu"],  # noqa: B006 - read only
    tensor_parallel: Count = 1,
    dtype: Dtype = "auto",
    label: int | str | None = None,
    max_tokens: Count = 4096,
    batch_items: Count = 64,
    batch_tokens: Count = 65536,
    chat: bool = True,
    scale: float = 1.0,
    threads: Annotated[int, Field(ge=0)] = 0,
    batch_limit_s: Annotated[float, Field(gt=0)] = 120.0,
    trust_remote_code: bool = False,
) -> float | Unscored:
    """The logit of the model's one label (of several: `label`), times `scale`.

    Example: `{model: some/reward-model, devices: ["cuda:0", "cuda:1"], dtype: bfloat16}` is two replicas that share the calls.
    The conversation is prompt and completion by the tokenizer's chat template (chat: false, or none: one after the other).
    Source: reward models as in Ouyang et al. 2022, section 3.5. Limits: a conversation of more than max_tokens is unscored, never cut.
    """
    spec = ModelSpec(
        kind="classification", model=model, devices=tuple(devices), tensor_parallel=tensor_parallel, dtype=dtype, label=label, max_tokens=max_tokens,
        batch_items=batch_items, batch_tokens=batch_tokens, chat=chat, threads=threads, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    answer = await fronts.of(spec, batch_limit_s).score(prompt, completion)
    return Unscored(answer, "error") if isinstance(answer, str) else scale * answer


def check(**args: Any) -> None:
    """Loads the model on every replica. Raises ValueError for packages, devices or a model that will not do."""
    check_devices(args.get("devices", ["cpu"]), args.get("tensor_parallel", 1))
    for module in ("torch", "transformers"):
        extras.installed(module, scorer="reward_model", extra="reward-model")
    fronts.of(ModelSpec.of("classification", args), args.get("batch_limit_s", 120.0))
