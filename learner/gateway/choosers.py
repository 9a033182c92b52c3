"""From the settings of a run's data sets to what chooses their prompts and what the account keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learner.data_config import PickedConfig, SetConfig
from learner.gateway.curriculum import MeasuredPasses
from learner.gateway.history import Rules
from learner.gateway.mixing import whole_weights
from learner.gateway.picking import Chooser, Picker, PlainPasses
from learner.gateway.prompts import Prompt, PromptOrder


def picker_of(sources: Mapping[str, SetConfig], prompts: Mapping[str, Sequence[Prompt]], *, seed: int) -> Picker:
    """prompts: of each set, in order of their rows in the catalog. Raises ValueError for a difficulty that is none."""
    choosers: dict[str, Chooser] = {}
    first_row = 0
    for name, one in sources.items():
        mine = prompts[name]
        order = PromptOrder(num_rows=len(mine), seed=seed, shuffle=one.shuffle, epochs=one.epochs)
        if one.tracked:
            choosers[name] = MeasuredPasses(one, order, first_row=first_row, difficulty=_difficulty(one, mine, f"data.sets.{name}" if name else "data"))
        else:
            choosers[name] = PlainPasses(order=order, first_row=first_row)
        first_row += len(mine)
    return Picker(whole_weights({name: one.weight for name, one in sources.items()}), choosers)


def rules_of(config: SetConfig) -> Rules:
    """What the account keeps of a data set."""
    replay = config.replay
    return Rules(
        weight=config.weight,
        tracked=config.tracked,
        kept_rates=config.kept_rates,
        kept_steps=replay.most,
        pass_reward=config.pass_reward,
        requeue=replay.requeue,
        requeue_most=replay.requeue_most,
    )


def _difficulty(config: PickedConfig, prompts: Sequence[Prompt], key: str) -> dict[int, float]:
    """By row within the set."""
    name = config.curriculum.difficulty_field if config.curriculum else ""
    return {row: _number(prompt, name, key) for row, prompt in enumerate(prompts)} if name else {}


def _number(prompt: Prompt, name: str, key: str) -> float:
    value = prompt.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{key}.curriculum.difficulty_field={name!r}: prompt {prompt.prompt_id!r} has {value!r} there; give every prompt a number from 0 (easy) to 1 (hard), and name the field in {key}.fields if that is used")
    return float(value)
