"""Every query of the Grafana dashboard returns data from a Prometheus that scrapes a launched run with the real engine. GPU figures come from a
made-up NVML (HEADRACE_TEST_NVML): what is shown of them is that the queries fit the figures, not that a GPU was read."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.prometheus_server import PrometheusServer
from tests.system.dashboard import draw, filled, panels
from tests.system.harness import wait_for
from tests.system.launched import launched, run_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_every_query_of_the_dashboard_returns_data(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    learner = {
        "staleness": {"max_staleness": 2}, "filter": {"zero_signal": True}, "algorithm": {"kl": {"coefficient": 0.01}}, "scorer": "parts", "checkpoint": {"every_steps": 20},
        "alarms": {"every_s": 1.0}, "trackers": {"tensorboard": {}},
    }  # fmt: skip
    far = {"name": "far", "http": {"urls": ["http://127.0.0.1:9/score"]}}  # never asked; its breaker is told all the same
    rollout = {"engine": "vllm", "replicas": 1, "max_model_len": 256, "max_num_seqs": 8, "kv_cache_bytes": 64 << 20, "threads": 1}
    file = run_file(tmp_path, tiny_model, learner=learner, rollout=rollout, reward={"scorers": [{"name": "parts", "use": "tests.system.scorers:with_parts"}, far]})
    with launched(file, HEADRACE_TEST_NVML="tests.fake_nvml") as run:
        run.wait_steps(2, limit_s=600)
        with PrometheusServer(run.run_dir / "prometheus.yml", tmp_path / "prometheus") as prometheus:
            began_s = time.time()
            run.wait_steps(8, limit_s=300)
            queries = {(panel["title"], target["expr"]): filled(target["expr"], "run") for panel in panels() for target in panel["targets"]}
            empty: list[Any] = []

            def all_there() -> bool:
                empty[:] = [where for where, query in queries.items() if not prometheus.query(query)]
                return not empty

            try:
                wait_for("data of every query", all_there, limit_s=90, every_s=2)
            except AssertionError:
                raise AssertionError(f"{len(empty)} of {len(queries)} queries returned nothing: {empty}") from None
            print(f"{len(queries)} queries of {len(list(panels()))} panels returned data; {len(run.steps())} steps")
            assert (run.run_dir / "tensorboard").is_dir() and not run.firing()
            if picture := os.environ.get("HEADRACE_DASHBOARD_PNG"):
                run.wait_steps(10, limit_s=300)
                draw(lambda query: prometheus.range(query, start_s=began_s, end_s=time.time(), step_s=2), "run", Path(picture))
