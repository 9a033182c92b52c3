"""Where a run's prompts come from (docs/data.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from learner.section import Count, Seconds, Section

FieldName = Annotated[str, StringConstraints(min_length=1)]


class SourceConfig(Section):
    """How the records of one data set are read and made into prompts; `prompts` says where they are."""

    format: Literal["auto", "jsonl", "parquet", "saved", "hub"] = Field(
        "auto", description="auto: by name and content; jsonl: one JSON object a line; parquet: a file or a folder of files; saved: a folder that `datasets` wrote; hub: an id on the Hugging Face hub"
    )
    split: str = Field("", description="of saved and hub; empty: the only one there is, `train` of a hub id")
    subset: str = Field("", description="hub only: the configuration's name; empty: the default one")
    revision: str = Field("", description="hub only: branch, tag or commit; empty: main")
    load_s: Seconds = Field(1800.0, description="reading anything but JSONL gives up after this")
    prompt_field: str = Field("prompt", description="field with the prompt: a string, or a list of chat messages")
    prompt_format: str = Field("", description="builds the prompt of several fields instead, for instance 'Q: {question}'; {{ is a brace")
    id_field: str = Field("", description="field with a stable id; empty: the number of the line or record, from 1")
    fields: dict[FieldName, FieldName] | None = Field(None, description="what scorers get: their name for it to the record's; None: all other fields under their own names")
    template: Literal["chat", "raw"] = Field("chat", description="chat: the model's chat template; raw: the string as it is")
    system: str | None = Field(None, description="system message put before the prompt; None: none")
    suffix: str = Field("", description="appended to a string prompt before the template")
    max_prompt_tokens: Count | None = Field(None, description="longest prompt; None: what the model allows")
    overlong: Literal["refuse", "drop"] = Field("refuse", description="refuse: the run does not start; drop: counted and left out")
    shuffle: bool = True
    epochs: Count | None = Field(None, description="passes over the prompts; None: until `steps`")

    @model_validator(mode="after")
    def _readable(self) -> SourceConfig:
        for key in ("subset", "revision"):
            if getattr(self, key) and self.format != "hub":
                raise ValueError(f"{key}={getattr(self, key)!r} with format={self.format}: only a data set of the hub has one; leave it out, or set format=hub")
        if self.split and self.format in ("jsonl", "parquet"):
            raise ValueError(f"split={self.split!r} with format={self.format}: such a file has no splits; name the file of that split")
        if self.prompt_format and self.prompt_field != "prompt":
            raise ValueError(f"prompt_format={self.prompt_format!r} with prompt_field={self.prompt_field!r}: the prompt is made by one of them; leave one out")
        return self


Reason = Literal["attempts", "unusable", "unscored", "zero_signal", "rolled_back"]


class BandCurriculum(Section):
    """A pass over the prompts leaves out those that are known to be too easy or too hard; some of those come in between."""

    kind: Literal["band"]
    low: float = Field(0.2, ge=0, le=1, description="pass rate under which a prompt is too hard")
    high: float = Field(0.8, ge=0, le=1, description="pass rate over which a prompt is too easy")
    min_share: float = Field(0.25, gt=0, lt=1, description="of the set's groups, for prompts outside the band, the longest not given first: none starves")
    groups: Count = Field(4, description="newest measured groups of a prompt that its pass rate is the mean of")
    difficulty_field: str = Field("", description="field with a difficulty from 0 (easy) to 1 (hard), for prompts not measured yet; empty: unknown, which counts as in the band")

    @model_validator(mode="after")
    def _band(self) -> BandCurriculum:
        if self.low > self.high:
            raise ValueError(f"curriculum.low={self.low} is over high={self.high}: no pass rate lies between; exchange them")
        return self


class SortedCurriculum(Section):
    """Every pass goes from easy to hard or back, by the pass rates known when it begins."""

    kind: Literal["sorted"]
    first: Literal["easy", "hard"] = "easy"
    groups: Count = Field(4, description="newest measured groups of a prompt that its pass rate is the mean of")
    difficulty_field: str = Field("", description="field with a difficulty from 0 (easy) to 1 (hard), for prompts not measured yet; empty: unknown, which counts as a pass rate of 0.5")


CurriculumConfig = Annotated[BandCurriculum | SortedCurriculum, Field(discriminator="kind")]


class ReplayConfig(Section):
    """When a prompt is given again, and when it is not given any more."""

    most: Count = Field(1, description="times that a prompt is given within `within_steps`")
    within_steps: Count | None = Field(None, description="policy steps; None: only the passes bound how often")
    requeue: tuple[Reason, ...] = Field((), description="reasons of dropped groups whose prompt is given again at once")
    requeue_most: Count = Field(1, description="times that a prompt is given again so, between two of its ordinary turns")
    solved_rate: float | None = Field(None, gt=0, le=1, description="pass rate from which a prompt is solved and not given any more; None: never")
    solved_groups: Count = Field(3, description="newest measured groups whose mean that is")
    unsolved_groups: Count | None = Field(None, description="measured groups in a row that nobody passed, after which a prompt is parked; None: never")
    recheck_epochs: Count | None = Field(None, description="passes after which a solved or parked prompt is given once more; None: never")

    @model_validator(mode="after")
    def _effective(self) -> ReplayConfig:
        if self.within_steps is None and self.most != 1:
            raise ValueError(f"replay.most={self.most} without within_steps: it says how often within so many steps; set within_steps, or leave most out")
        if self.recheck_epochs is not None and self.solved_rate is None and self.unsolved_groups is None:
            raise ValueError(f"replay.recheck_epochs={self.recheck_epochs} with neither solved_rate nor unsolved_groups: no prompt is ever left out; leave it out")
        return self


class PickedConfig(SourceConfig):
    """A data set that is trained on: which of its prompts come when."""

    curriculum: CurriculumConfig | None = Field(None, description="None: plain passes")
    replay: ReplayConfig = ReplayConfig()
    pass_reward: float = Field(0.5, description="a sample with at least this reward has passed")

    @property
    def tracked(self) -> bool:
        """Whether the account keeps what happened to each prompt."""
        replay = self.replay
        return self.curriculum is not None or bool(replay.requeue) or any(value is not None for value in (replay.within_steps, replay.solved_rate, replay.unsolved_groups))

    @property
    def kept_rates(self) -> int:
        """Pass rates of a prompt that are kept, the newest."""
        return max(self.curriculum.groups if self.curriculum else 1, self.replay.solved_groups if self.replay.solved_rate is not None else 1, self.replay.unsolved_groups or 1)


class SetConfig(PickedConfig):
    """One of several data sets."""

    prompts: Path = Field(description="JSONL or Parquet file, folder, or hub id")
    weight: float = Field(1.0, gt=0, description="share of the groups, against the other sets' weights")
    group_size: Count | None = Field(None, description="samples of one prompt; None: sampling.group_size")
    max_new_tokens: Count | None = Field(None, description="None: sampling.max_new_tokens")
    zero_signal: bool | None = Field(None, description="drop groups whose rewards are all equal; None: as filter.zero_signal and the set's own preset say")
    algorithm: dict[str, Any] = Field({}, description="settings of `algorithm` for this set: on top of the run's, or, with a name, of that preset; empty: the run's")


class DataConfig(PickedConfig):
    """The prompts of a run: one data set, or several in `sets`. What stands beside `sets` holds for each set that does not say otherwise."""

    prompts: Path | None = Field(None, description="JSONL or Parquet file, folder, or hub id; None: `sets` has them")
    sets: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,39}$")], SetConfig] = Field({}, description="data sets by name, mixed by weight")
    on_change: Literal["refuse", "restart"] = Field("refuse", description="when the data of a run that goes on is not what it began with: refuse; restart: begin its passes anew, unfinished groups are dropped as data_changed")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """What stands beside `sets`, under what each set says."""
        if not isinstance(given, dict) or not isinstance(given.get("sets"), dict):
            return given
        beside = {key: value for key, value in given.items() if key in PickedConfig.model_fields}
        return {**given, "sets": {name: {**beside, **value} if isinstance(value, dict) else value for name, value in given["sets"].items()}}

    @model_validator(mode="after")
    def _one_or_several(self) -> DataConfig:
        if (self.prompts is None) == (not self.sets):
            raise ValueError(f"prompts={str(self.prompts) if self.prompts else None!r} with {len(self.sets)} sets: a run has one data set (prompts) or several (sets); give exactly one of the two")
        return self

    @property
    def sources(self) -> dict[str, SetConfig]:
        """The data sets by name, in order; a single one has the name ""."""
        if self.sets:
            return dict(self.sets)
        return {"": SetConfig.model_validate({"prompts": self.prompts, **{key: getattr(self, key) for key in PickedConfig.model_fields}})}

    def key_of(self, name: str) -> str:
        """Where the settings of a set stand, for messages."""
        return f"data.sets.{name}" if name else "data"
