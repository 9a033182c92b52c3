"""What Prometheus needs of a run: run_dir/prometheus.yml, and beside it the targets and the alert rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.mistakes import Mistakes
from deploy.processes import processes
from deploy.prometheus.generate import rules
from deploy.schema import RunFile, load
from deploy.services import write_atomically
from learner.alarm_config import AlarmConfig
from learner.config import LearnerConfig
from learner.watch.expressions import duration
from protos.security import SecurityConfig

REFRESH = "5s"  # of the file with the targets
HEAD = "# Written at each launch. Try it: prometheus --config.file=THIS_FILE --storage.tsdb.path=/tmp/prometheus\n"
NO_FILE = "# security.token_env names a variable, which Prometheus does not read: name a file with security.token_file, or it is refused.\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scraped:
    """What is written of a run. Example: `Scraped(run_dir=Path("runs/first"), alarms=AlarmConfig(), security=SecurityConfig())`"""

    run_dir: Path
    alarms: AlarmConfig
    security: SecurityConfig
    scrape_s: float = 5.0


def write_scraping(run: RunFile, services: Mapping[str, str]) -> Path | None:
    """The path of prometheus.yml; None: no service tells figures, and nothing is written. services: host:port of the figures by name; empty: none."""
    return _write(_of(run), services)


def scrape_config_of(target: Path, *, overrides: dict[str, Any] | None = None) -> Path:
    """Writes the same for the folder of a launched run, or for a run file that fixes its addresses. Raises Mistakes where these are not known."""
    if target.is_dir():
        scraped, services = _launched(target)
    else:
        run = load(target, overrides=overrides)
        scraped, services = _of(run), {process.name: process.wants_metrics for process in processes(run)}
    if free := [name for name, address in services.items() if address.endswith(":0")]:
        raise Mistakes([f"{target}: {', '.join(free)} would tell figures on a port that is chosen at launch; give the folder of the launched run, or metrics_address=HOST:PORT in the sections"])
    file = _write(scraped, services)
    if file is None:
        raise Mistakes([f"{target}: no service of this run tells figures; set observability.metrics=true, or metrics_address in the sections"])
    return file


def _of(run: RunFile) -> Scraped:
    return Scraped(run_dir=run.run_dir, alarms=run.learner.alarms, security=run.security, scrape_s=run.observability.scrape_s)


def _launched(run_dir: Path) -> tuple[Scraped, dict[str, str]]:
    """A run and its addresses, as its folder says. Raises Mistakes for a folder in which none was launched."""
    file = run_dir / "resolved" / "learner.json"
    if not file.is_file():
        raise Mistakes([f"{run_dir}: no learner was started in this folder; give the folder of a launched run, or a run file"])
    learner = LearnerConfig.model_validate(json.loads(file.read_text()))
    targets = run_dir / "prometheus" / "targets.json"
    if targets.is_file():
        services = {each["labels"]["name"]: str(each["targets"][0]) for each in json.loads(targets.read_text())}
    else:
        services = {each.stem: json.loads(each.read_text()).get("metrics_address", "") for each in sorted((run_dir / "resolved" / "launch").glob("*.json"))}
    return Scraped(run_dir=run_dir, alarms=learner.alarms, security=learner.security), services


def _write(scraped: Scraped, services: Mapping[str, str]) -> Path | None:
    targets = [_target(scraped, name, address) for name, address in services.items() if address]
    if not targets:
        return None
    folder = scraped.run_dir / "prometheus"
    write_atomically(folder / "targets.json", json.dumps(targets, indent=2) + "\n")
    write_atomically(folder / "rules.yml", rules(scraped.alarms))
    file = scraped.run_dir / "prometheus.yml"
    write_atomically(file, configuration(scraped.security, scraped.scrape_s))
    return file


def configuration(security: SecurityConfig, scrape_s: float = 5.0) -> str:
    """prometheus.yml; paths in it are seen from its own folder, but for those of secrets."""
    job: dict[str, Any] = {"job_name": "headrace", "file_sd_configs": [{"files": ["prometheus/targets.json"], "refresh_interval": REFRESH}]}
    if security.certificate is not None:
        job |= {"scheme": "https", **({"tls_config": {"ca_file": str(security.ca.absolute())}} if security.ca else {})}
    if security.token_file is not None:
        job["authorization"] = {"credentials_file": str(security.token_file.absolute())}
    content = {
        "global": {"scrape_interval": duration(scrape_s), "evaluation_interval": duration(scrape_s)},
        "rule_files": ["prometheus/rules.yml"],
        "scrape_configs": [job],
    }
    return HEAD + (NO_FILE if security.token_env else "") + yaml.safe_dump(content, sort_keys=False)


def _target(run: Scraped, name: str, address: str) -> dict[str, Any]:
    return {"targets": [address], "labels": {"run": run.run_dir.name, "service": name.partition("-")[0], "name": name}}
