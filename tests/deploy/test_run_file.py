"""Run files: what is right loads, each contradiction is told in one line with its values and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.dry_run import describe, max_open_groups
from deploy.fleet import LocalFleet
from deploy.mistakes import Mistakes
from deploy.schema import RunFile, load, parse, with_overrides
from deploy.services import Service
from tests.certificates import Authority


def services_of(run: RunFile) -> list[Service]:
    """As the local launcher would start them."""
    fleet = LocalFleet(run, lambda _: None)
    return fleet.services(*fleet.first)


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A run that is right."""
    prompts = tmp_path / "train.jsonl"
    prompts.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return {
        "run_dir": str(tmp_path / "run"),
        "model": str(model),
        "learner": {"data": {"prompts": str(prompts), "max_prompt_tokens": 100}, "sampling": {"max_new_tokens": 28}, "scorer": "answer"},
        "rollout": {"max_model_len": 128, "replicas": 2},
        "reward": {"scorers": [{"name": "answer", "use": "last_number"}]},
    }


def mistakes(content: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
    with pytest.raises(Mistakes) as caught:
        parse(content, where="run.yaml", overrides=overrides)
    return caught.value.lines


def test_model_and_run_dir_are_said_once_for_all_sections(content: dict[str, Any]) -> None:
    run = parse(content, where="run.yaml")
    assert run.learner.model == run.rollout.model == content["model"]
    assert str(run.learner.run_dir) == content["run_dir"]


def test_security_is_said_once_for_all_services_and_holds_no_secret(content: dict[str, Any], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server", days=1)
    (tmp_path / "token").write_text("s3cret")
    section = {"certificate": str(certificate), "key": str(key), "ca": str(authority.ca), "token_file": str(tmp_path / "token")}
    run = parse({**content, "security": section}, where="run.yaml")
    assert run.reward is not None and run.learner.security == run.rollout.security == run.reward.security == run.security
    services = services_of(run)
    assert all(service.security.token == "s3cret" for service in services)  # of their health checks
    written = "".join(file.read_text() for file in Path(content["run_dir"]).rglob("*.json")) + json.dumps(describe(run)) + repr(services)
    assert "s3cret" not in written and str(tmp_path / "token") in written


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"learner.stepz": 5}, ["run.yaml: learner.stepz: unknown key (value 5)"]),
    ({"rollout.security": {"off": ["tls"]}}, ["run.yaml: rollout.security: every service of a run has the same; move it to the top"]),
    ({"rollout.address": "127.0.0.1:7500"}, ["run.yaml: rollout.address=127.0.0.1:7500: a launched run finds a free address for each of its servers", "remove it (`headrace serve rollout` listens where it is told)"]),
    ({"reward.address": "127.0.0.1:7500"}, ["run.yaml: reward.address=127.0.0.1:7500: a launched run finds a free address"]),
    ({"rollout.openai.address": "127.0.0.1:7500", "rollout.replicas": 2}, ["run.yaml: rollout.openai.address=127.0.0.1:7500 with 2 replicas: only one of them could listen there; use port 0"]),
    ({"learner.address": "0.0.0.0:1"}, ["run.yaml: address=0.0.0.0:1 can be reached from other machines, and security gives no tls and no token"]),
    ({"security.token_env": "NOT_SET_ANYWHERE"}, ["run.yaml: security.token_env=NOT_SET_ANYWHERE: this environment variable is not set"]),
    ({"learner.steps": 0}, ["run.yaml: learner.steps: Input should be greater than or equal to 1, got 0"]),
    ({"rollout.replicas": 0}, ["run.yaml: rollout.replicas: Input should be greater than or equal to 1, got 0"]),
    ({"learner.data": {}}, ["run.yaml: learner.data: prompts=None with 0 sets", "give exactly one of the two"]),
    ({"learner.sampling.temperature": 0}, ["run.yaml: learner: sampling.temperature=0 with group_size=8", "above 0"]),
    ({"rollout.model": "other"}, ["rollout.model='other' differs from model=", "remove rollout.model"]),
    ({"reward.scorers": [{"name": "answer", "group": {"op": "rank", "of": "x"}}, {"name": "x", "use": "exact"}]}, ["'answer' compares whole groups and rollout.score_groups is false"]),
    ({"learner.scorer": "style"}, ["learner.scorer='style' is none of reward.scorers ['answer']", "name one of them"]),
    ({"reward.scorers": [{"name": "answer", "use": "exakt"}]}, ["run.yaml: reward.scorers.0.use: 'exakt' is no built-in scorer; did you mean 'exact'?"]),
    ({"learner.data.prompts": "/no/such.jsonl"}, ["learner.data.prompts='/no/such.jsonl': no such file"]),
    ({"learner.data": {"sets": {"a": {"prompts": "/no/such.parquet"}}}}, ["learner.data.sets.a.prompts='/no/such.parquet': no such file"]),
    ({"rollout.dtype": "bfloat16"}, ["learner.trainer.served_dtype=float32 differs from rollout.dtype=bfloat16", "set both to bfloat16"]),
    # faults.md 45: one side alone; a side that computes in float32 anyway needs no setting
    (
        {"learner.trainer.served_dtype": "bfloat16", "learner.trainer.compute_dtype": "bfloat16", "learner.trainer.head_dtype": "float32", "rollout.dtype": "bfloat16"},
        ["learner.trainer.head_dtype=float32 differs from rollout.head_dtype=compute", "set both to float32, or neither"],
    ),
    ({"learner.trainer.served_dtype": "bfloat16", "learner.trainer.compute_dtype": "bfloat16", "rollout.dtype": "bfloat16", "rollout.head_dtype": "float32"}, ["learner.trainer.head_dtype=compute differs from rollout.head_dtype=float32"]),
    ({"rollout.max_model_len": 127}, ["rollout.max_model_len=127 is less than", "100 + 28 = 128", "128 or more"]),
    ({"learner.data.max_prompt_tokens": 500, "rollout.max_model_len": 528}, ["max_prompt_tokens=500", "reads 512 positions", "at most 484"]),
    ({"rollout.max_model_len": 1024}, ["rollout.max_model_len=1024", "reads 512 positions", "at most 512"]),
    ({"rollout.learner": "10.0.0.1:7430"}, ["rollout.learner='10.0.0.1:7430'", "remove rollout.learner"]),
    ({"rollout.rewards": ["10.0.0.1:1"]}, ["rollout.rewards=['10.0.0.1:1'] with a reward section", "keep one"]),
    ({"reward": None}, ["reward: missing, and rollout.rewards is empty", "add a reward section"]),
    ({"placement.learner_gpus": [0, 1]}, ["placement.learner_gpus=[0, 1] for learner.trainer.ranks=1", "one GPU a rank"]),
    ({"placement.rollout_gpus": [[0]]}, ["placement.rollout_gpus lists 1 replicas, rollout.replicas=2"]),
    ({"placement.rollout_gpus": [[0, 1], [2]]}, ["placement.rollout_gpus has [0, 1] for rollout.tensor_parallel=1"]),
    ({"placement.rollout_gpus": [[0], [0]]}, ["placement.rollout_gpus gives GPU [0] to two replicas"]),
    (
        {"placement.learner_gpus": [1], "placement.rollout_gpus": [[0], [1]], "learner.push.transport": "nccl"},
        ["learner.push.transport=nccl with GPU [1]", "NCCL refuses two ranks on one device", "auto or gloo, or separate GPUs"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), CASES, ids=lambda value: next(iter(value)))
def test_a_contradiction_is_one_line_with_its_values_and_the_way_out(content: dict[str, Any], overrides: dict[str, Any], words: list[str]) -> None:
    lines = mistakes(content, overrides)
    assert len(lines) == 1
    assert lines[0].startswith("run.yaml: ")
    for word in words:
        assert word in lines[0]


def test_two_contradictions_are_two_lines(content: dict[str, Any]) -> None:
    assert len(mistakes(content, {"rollout.dtype": "float16", "learner.scorer": "style"})) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1, 2]", "must hold a mapping of keys, got list"), ("a: [", "not YAML"), ("", "must hold a mapping of keys, got NoneType")],
)
def test_a_file_that_is_no_mapping_is_told(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(Mistakes) as caught:
        load(file)
    assert caught.value.lines[0].startswith(f"{file}: ") and words in caught.value.lines[0]


def test_an_override_below_a_plain_value_is_told(content: dict[str, Any]) -> None:
    with pytest.raises(Mistakes, match="run_dir is '.*' and has nothing below it"):
        parse(content, where="run.yaml", overrides={"run_dir.x": 1})


def test_open_groups_follow_the_staleness_bound(content: dict[str, Any]) -> None:
    run = parse(content, where="x", overrides={"learner.staleness": {"max_staleness": 2, "window": 5}, "learner.groups_per_step": 8})
    assert max_open_groups(run.learner) == 20  # (2 + 1) * 8 - (5 - 1)


def test_services_know_each_others_addresses_before_they_start(content: dict[str, Any]) -> None:
    run = parse(content, where="run.yaml", overrides={"reward.replicas": 2})
    services = {service.name: service for service in services_of(run)}
    assert list(services) == ["reward-0", "reward-1", "rollout-0", "rollout-1", "learner"]
    config = json.loads((run.run_dir / "resolved" / "launch" / "rollout-1.json").read_text())
    assert config["learner"] == services["learner"].address
    assert config["rewards"] == [services["reward-0"].address, services["reward-1"].address]
    assert (config["address"], config["replica_id"], config["seed"]) == (services["rollout-1"].address, "rollout-1", 1)
    assert "replicas" not in config
    assert [service.restart for service in services.values()] == [True, True, True, True, False]
    assert [service.grace_s for service in services.values()] == [0, 0, 0, 0, 60 + 20]  # leave_s, and its end: a learner that is told to stop is not killed in its cut


def test_a_learners_address_is_kept_and_its_port_0_is_fixed_before_the_start(content: dict[str, Any]) -> None:
    named = services_of(parse(content, where="x", overrides={"learner.address": "127.0.0.1:7999"}))[-1]
    assert named.address == "127.0.0.1:7999"
    free = services_of(parse(content, where="x", overrides={"learner.address": "0.0.0.0:0", "security.off": ["tls", "token"]}))[-1]
    assert free.address.startswith("0.0.0.0:") and not free.address.endswith(":0")


def test_placement_reaches_the_processes_by_environment(content: dict[str, Any]) -> None:
    run = parse(content, where="x", overrides={"placement": {"learner_gpus": [2], "rollout_gpus": [[0], [1]]}})
    shown = {service.name: service.environment.get("CUDA_VISIBLE_DEVICES") for service in services_of(run)}
    assert shown == {"reward-0": None, "rollout-0": "0", "rollout-1": "1", "learner": "2"}


def test_the_dry_run_writes_nothing(content: dict[str, Any]) -> None:
    run = parse(content, where="x")
    assert yaml.safe_load(json.dumps(describe(run)))["samples_a_step"] == 64
    assert not run.run_dir.exists()


def test_a_head_setting_without_effect_on_one_side_is_no_contradiction(content: dict[str, Any]) -> None:
    for key in ("learner.trainer.head_dtype", "rollout.head_dtype"):
        parse(content, where="run.yaml", overrides={key: "float32"})


def test_an_item_of_a_list_is_set_by_its_number() -> None:
    content: dict[str, Any] = {"rollout": {"environments": [{"name": "a", "max_turns": 2}, {"name": "b"}]}, "run_dir": "r"}
    made = with_overrides(content, {"rollout.environments.1.max_turns": 5, "rollout.environments.0": {"name": "c"}})
    assert made["rollout"]["environments"] == [{"name": "c"}, {"name": "b", "max_turns": 5}] and content["rollout"]["environments"][0]["name"] == "a"
    for key in ("rollout.environments.2.name", "rollout.environments.first.name", "rollout.environments.7"):
        with pytest.raises(Mistakes, match="environments is a list of 2 and has no"):
            with_overrides(content, {key: 1})


def test_an_environment_elsewhere_needs_a_port(content: dict[str, Any]) -> None:
    (line,) = mistakes(content, {"rollout.environments": [{"name": "sums", "use": "grpc://127.0.0.1"}]})
    assert "rollout.environments: sums: use='127.0.0.1' must be host:port" in line
