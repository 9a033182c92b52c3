"""Records of Parquet files and saved data sets become the same prompts as those of JSONL, read outside the gateway's process."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.data_config import SourceConfig
from learner.gateway import records, tables
from learner.gateway.prompts import load_prompts
from learner.gateway.records import kind_of

ROWS = [{"prompt": f"q{n}", "answer": n, "meta": {"truth": f"t{n}", "hint": "h"}} for n in range(3)]


def jsonl(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_parquet_file_gives_the_prompts_of_the_same_jsonl_and_its_fingerprint(tmp_path: Path) -> None:
    kept, cache = parquet(tmp_path / "rows.parquet"), tmp_path / "cache" / "records.jsonl"
    read = load_prompts(kept, cache=cache)
    assert list(read) == list(load_prompts(jsonl(tmp_path))) and read.fingerprint == load_prompts(jsonl(tmp_path)).fingerprint
    assert [prompt.prompt_id for prompt in read] == ["1", "2", "3"]


def test_what_was_read_once_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, cache = parquet(tmp_path / "rows.parquet"), tmp_path / "records.jsonl"
    first = load_prompts(kept, cache=cache).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(records, "_convert", lambda *_: pytest.fail("was read again"))
        assert load_prompts(kept, cache=cache).fingerprint == first
    parquet(kept, [*ROWS, {"prompt": "q3", "answer": 3, "meta": {"truth": "t3", "hint": "h"}}])
    assert len(load_prompts(kept, cache=cache)) == 4
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("records")] == ["records.jsonl"]


def test_a_folder_of_parquet_files_is_read_in_order_of_name(tmp_path: Path) -> None:
    parquet(tmp_path / "set" / "b.parquet", ROWS[2:])
    parquet(tmp_path / "set" / "a.parquet", ROWS[:2])
    source = SourceConfig(fields={"truth": "meta.truth"}, id_field="answer", prompt_format="{{{prompt}}} {meta.hint}")
    read = load_prompts(tmp_path / "set", source)
    assert [(prompt.text, prompt.fields, prompt.prompt_id) for prompt in read] == [(f"{{q{n}}} h", {"truth": f"t{n}"}, str(n)) for n in range(3)]


def test_a_saved_data_set_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
    datasets.DatasetDict({"train": train.select([2, 0]), "test": test}).save_to_disk(str(tmp_path / "both"))
    assert [prompt.text for prompt in load_prompts(tmp_path / "both", SourceConfig(split="train"))] == ["q2", "q0"]  # `select` keeps an index beside the table


@pytest.mark.parametrize(
    ("split", "words"),
    [("", "here has the splits train, test; choose one with data.split"), ("dev", "data.split='dev' is none of the splits of here: train, test")],
)
def test_a_split_that_must_be_chosen_is_asked_for(split: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        tables._split({"train": 1, "test": 2}, {"split": split, "key": "data"}, "here")


BAD: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}], {"id_field": "id"}, r"rows.parquet record 2: id '1' was used on record 1 already"),
    ([{"prompt": "a"}, {"prompt": None}], {}, r"record 2: field 'prompt' is a NoneType; give a string"),
    ([{"question": "a"}], {}, r"record 1: no field 'prompt' \(it has 'question'\); name the field with data.prompt_field"),
    ([{"prompt": "a", "when": datetime.date(2026, 1, 1)}], {}, r"record 1: field 'when' holds a date, which scorers cannot get; choose what they need with data.fields"),
    ([{"prompt": "a", "x": {"y": 1}}], {"fields": {"z": "x.q"}}, r"record 1: no field 'x.q' .* name the field with data.fields.z"),
    ([{"prompt": "a", "x": [1]}], {"prompt_format": "{x}"}, r"record 1: field 'x' of data.prompt_format is \[1\]; only texts and numbers"),
    ([], {}, r"rows.parquet holds no prompts"),
]


@pytest.mark.parametrize(("rows", "source", "words"), BAD)
def test_a_bad_record_is_one_line_with_its_number_and_the_way_out(tmp_path: Path, rows: list[dict[str, Any]], source: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load_prompts(parquet(tmp_path / "rows.parquet", rows), SourceConfig(**source))
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_chosen_away_need_not_be_plain(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", [{"prompt": "a", "answer": 1, "raw": b"\x00"}])
    assert load_prompts(path, SourceConfig(fields={"answer": "answer"}))[0].fields == {"answer": 1}


def test_an_unknown_format_a_damaged_file_and_one_that_takes_too_long_are_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    with pytest.raises(ValueError, match=r"data.prompts=.*rows.csv: the ending '.csv' is none of .jsonl, .ndjson, .json, .parquet; set data.format, or convert it"):
        load_prompts(tmp_path / "rows.csv")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ValueError, match=r"data.prompts=.*torn.parquet cannot be read: ArrowInvalid: .*; correct the path"):
        load_prompts(tmp_path / "torn.parquet")
    with pytest.raises(ValueError, match=r"was not read within data.load_s=0.001; raise it"):
        load_prompts(parquet(tmp_path / "rows.parquet"), SourceConfig(load_s=0.001))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty is a folder with neither a saved data set nor Parquet files; give one that has either"):
        load_prompts(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"data.split='dev': .*rows.jsonl is JSONL, which has no splits"):
        load_prompts(jsonl(tmp_path), SourceConfig(split="dev"))


def test_a_hub_id_that_cannot_be_reached_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert kind_of(Path("owner/name"), SourceConfig(format="hub")) == "hub"
    with pytest.raises(ValueError, match=r"data.prompts=owner/name cannot be read: .*; correct the path, id, split or revision") as caught:
        load_prompts(Path("owner/name"), SourceConfig(format="hub", revision="abc"))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"revision": "main"}, "revision='main' with format=auto: only a data set of the hub has one"),
        ({"split": "train", "format": "jsonl"}, "split='train' with format=jsonl: such a file has no splits"),
        ({"prompt_format": "{a}", "prompt_field": "b"}, "the prompt is made by one of them"),
        ({"load_s": 0}, "greater than 0"),
    ],
)
def test_options_without_effect_fail_at_load(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SourceConfig(**options)


@pytest.mark.parametrize("text", ["no field", "{", "{}", "{a:5}", "{a!r}"])
def test_a_prompt_format_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"data.prompt_format=.*write \{field\} for a field"):
        load_prompts(jsonl(tmp_path), SourceConfig(prompt_format=text))


def test_the_gateway_never_imports_what_reads_tables(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet")
    code = f"import sys, pathlib; from learner.gateway.prompts import load_prompts; load_prompts(pathlib.Path({str(path)!r})); print(*{{'pyarrow', 'datasets', 'pandas'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True).stdout.strip() == ""
