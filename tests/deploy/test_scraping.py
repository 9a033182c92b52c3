"""What `headrace launch` writes for Prometheus, and the alert rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy.fleet import LocalFleet
from deploy.prometheus.generate import FILE
from deploy.schema import RunFile, parse
from deploy.scraping import configuration, scrape_config_of, write_scraping
from deploy.services import Service
from learner.alarm_config import AlarmConfig
from protos.security import SecurityConfig
from tests.deploy.test_metrics_page import FIGURES
from tests.prometheus_server import promtool

ROOT = Path(__file__).resolve().parents[2]
ALARMS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
EXPORTED = {figure.name: set(figure.labels) for figure in FIGURES}


def a_run(folder: Path, **more: Any) -> Any:
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    content = {
        "run_dir": str(folder / "first"), "model": "someone/model",
        "learner": {"data": {"prompts": str(folder / "prompts.jsonl")}, "trainer": {"served_dtype": "float32"}},
        "rollout": {"replicas": 2}, "reward": {"scorers": [{"name": "answer", "use": "exact"}]}, **more,
    }  # fmt: skip
    return parse(content, where="test")


def services_of(run: RunFile) -> list[Service]:
    """As the local launcher would start them."""
    fleet = LocalFleet(run, lambda _: None)
    return fleet.services(*fleet.first)


def test_every_service_has_a_target_of_its_own(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    services = services_of(run)
    assert write_scraping(run, {service.name: service.metrics_address for service in services}) == run.run_dir / "prometheus.yml"
    targets = json.loads((run.run_dir / "prometheus" / "targets.json").read_text())
    assert [(each["labels"]["name"], each["labels"]["service"], each["labels"]["run"]) for each in targets] == [
        ("reward-0", "reward", "first"), ("rollout-0", "rollout", "first"), ("rollout-1", "rollout", "first"), ("learner", "learner", "first"),
    ]  # fmt: skip
    configured = [json.loads((run.run_dir / "resolved" / "launch" / f"{service.name}.json").read_text())["metrics_address"] for service in services]
    addresses = [each["targets"][0] for each in targets]
    assert addresses == configured and len({*addresses, *(service.address for service in services)}) == 8
    written = yaml.safe_load((run.run_dir / "prometheus.yml").read_text())
    promtool("check", "config", str(run.run_dir / "prometheus.yml"))
    for file in (*written["rule_files"], *written["scrape_configs"][0]["file_sd_configs"][0]["files"]):
        assert (run.run_dir / file).is_file()


async def test_a_replica_that_was_stopped_for_good_is_no_target_any_more(tmp_path: Path) -> None:
    """Prometheus would say for ever that it is down."""
    fleet = LocalFleet(a_run(tmp_path, rollout={"replicas": 2}), lambda _: None)
    fleet.services(*fleet.first)
    await fleet.stop("rollout-1")
    targets = json.loads((tmp_path / "first" / "prometheus" / "targets.json").read_text())
    assert [each["labels"]["name"] for each in targets] == ["reward-0", "rollout-0", "learner"]


def test_rules_and_pace_are_the_runs_own(tmp_path: Path) -> None:
    run = a_run(tmp_path, observability={"scrape_s": 0.5}).model_copy(deep=True)
    learner = run.learner.model_copy(update={"alarms": run.learner.alarms.model_copy(update={"no_step_minutes": 7.0})})
    run = run.model_copy(update={"learner": learner})
    assert write_scraping(run, {service.name: service.metrics_address for service in services_of(run)}) is not None
    assert "step_age_seconds > 420" in (run.run_dir / "prometheus" / "rules.yml").read_text()
    assert yaml.safe_load((run.run_dir / "prometheus.yml").read_text())["global"] == {"scrape_interval": "500ms", "evaluation_interval": "500ms"}


def test_the_same_is_written_for_a_run_file_with_fixed_addresses_and_for_the_folder_of_a_launched_run(tmp_path: Path) -> None:
    fixed = {f"{section}.metrics_address": f"127.0.0.1:{port}" for section, port in (("learner", 9101), ("rollout", 9102), ("reward", 9103))}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(a_run(tmp_path, rollout={"replicas": 1}).model_dump(mode="json", exclude_unset=True)))
    with pytest.raises(ValueError, match=r"reward-0, rollout-0, learner would tell figures on a port that is chosen at launch; give the folder"):
        scrape_config_of(file)
    written = scrape_config_of(file, overrides=fixed)
    targets = written.parent / "prometheus" / "targets.json"
    assert {each["labels"]["name"]: each["targets"] for each in json.loads(targets.read_text())} == {"reward-0": ["127.0.0.1:9103"], "rollout-0": ["127.0.0.1:9102"], "learner": ["127.0.0.1:9101"]}
    promtool("check", "config", str(written))
    with pytest.raises(ValueError, match="no learner was started in this folder"):
        scrape_config_of(written.parent)
    (written.parent / "resolved").mkdir()
    changed = a_run(tmp_path).learner.model_copy(update={"alarms": AlarmConfig(stalled_s=33)})
    (written.parent / "resolved" / "learner.json").write_text(changed.model_dump_json())
    before = targets.read_text()
    assert scrape_config_of(written.parent) == written and targets.read_text() == before
    assert "stalled_seconds > 33" in (written.parent / "prometheus" / "rules.yml").read_text()


def test_a_run_that_tells_no_figures_has_no_configuration(tmp_path: Path) -> None:
    run = a_run(tmp_path, observability={"metrics": False})
    assert write_scraping(run, {service.name: service.metrics_address for service in services_of(run)}) is None and not (run.run_dir / "prometheus.yml").exists()


def test_a_fixed_port_for_two_replicas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout.metrics_address=127.0.0.1:9100 with rollout.replicas=2: only one of them could listen there"):
        a_run(tmp_path, rollout={"replicas": 2, "metrics_address": "127.0.0.1:9100"})


def test_a_scrape_uses_the_runs_tls_and_token() -> None:
    job = yaml.safe_load(configuration(SecurityConfig(certificate=Path("/s/c.pem"), key=Path("/s/k.pem"), ca=Path("/s/ca.pem"), token_file=Path("/s/token"))))["scrape_configs"][0]
    assert (job["scheme"], job["tls_config"], job["authorization"]) == ("https", {"ca_file": "/s/ca.pem"}, {"credentials_file": "/s/token"})
    assert "security.token_file" in configuration(SecurityConfig(token_env="TOKEN"))


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda alarm: alarm["alert"])
def test_an_alarm_asks_for_figures_that_are_exported_and_has_its_entry(alarm: dict[str, Any]) -> None:
    promql_parser.parse(alarm["expr"])
    names = set(re.findall(r"headrace_\w+", alarm["expr"]))
    assert names <= EXPORTED.keys() and (names or alarm["alert"] == "HeadraceServiceDown")
    for name, labels in re.findall(r"(headrace_\w+)\{([^}]*)\}", alarm["expr"]):
        assert {part.partition("=")[0].rstrip("!") for part in labels.split(",")} <= EXPORTED[name]
    assert alarm["labels"]["severity"] in ("info", "warning", "critical") and alarm["annotations"]["summary"]
    page, _, anchor = alarm["annotations"]["page"].partition("#")
    section = re.search(rf"^### {alarm['alert']}\n\n(.*?)\n(?=\n#)", (ROOT / page).read_text(), re.M | re.S)
    assert section is not None and anchor == alarm["alert"].lower()
    assert "*Means*" in section[1] and "*Do*" in section[1]


def test_every_entry_is_of_an_alarm() -> None:
    entries = re.findall(r"^### (Headrace\w+)$", (ROOT / "docs" / "operating.md").read_text(), re.M)
    assert entries == [alarm["alert"] for alarm in ALARMS]
