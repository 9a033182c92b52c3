"""What Prometheus needs of a run: run_dir/prometheus.yml, and beside it the targets and the alert rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.prometheus.generate import rules
from deploy.schema import RunFile
from deploy.services import write_atomically
from learner.watch.expressions import duration
from protos.security import SecurityConfig

REFRESH = "5s"  # of the file with the targets
HEAD = "# Written at each launch. Try it: prometheus --config.file=THIS_FILE --storage.tsdb.path=/tmp/prometheus\n"
NO_FILE = "# security.token_env names a variable, which Prometheus does not read: name a file with security.token_file, or it is refused.\n"


def write_scraping(run: RunFile, services: Mapping[str, str]) -> Path | None:
    """The path of prometheus.yml; None: no service tells figures, and nothing is written. services: host:port of the figures by name; empty: none."""
    targets = [_target(run, name, address) for name, address in services.items() if address]
    if not targets:
        return None
    folder = run.run_dir / "prometheus"
    write_atomically(folder / "targets.json", json.dumps(targets, indent=2) + "\n")
    write_atomically(folder / "rules.yml", rules(run.learner.alarms))
    file = run.run_dir / "prometheus.yml"
    write_atomically(file, configuration(run.security, run.observability.scrape_s))
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


def _target(run: RunFile, name: str, address: str) -> dict[str, Any]:
    return {"targets": [address], "labels": {"run": run.run_dir.name, "service": name.partition("-")[0], "name": name}}
