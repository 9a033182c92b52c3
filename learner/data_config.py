"""Where a run's prompts come from (docs/data.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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


class DataConfig(SourceConfig):
    """The prompts of a run."""

    prompts: Path = Field(description="JSONL or Parquet file, folder, or hub id")
