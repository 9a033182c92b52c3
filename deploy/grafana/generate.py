"""`python -m deploy.grafana.generate`: writes headrace.json beside this file, from the table of panels. Needs the extra `dev`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

FILE = Path(__file__).with_name("headrace.json")
RUN = '{run="$run"}'
SOURCE = DataSourceRef(type_val="prometheus", uid="headrace")  # as in provisioning/datasource.yml
RED_FROM_1 = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps([Threshold(value=None, color="green"), Threshold(value=1.0, color="red")])
BY_THRESHOLD = dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS)
WIDTH, HEIGHT = 8, 7  # three panels a row of Grafana's 24 columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One figure. Example: `Panel(title="Loss", unit="none", queries={"loss": "headrace_trainer_loss" + RUN})`"""

    title: str
    unit: str  # of Grafana's: none, s, bytes, Bps, percentunit, watt
    queries: dict[str, str]  # legend, with {{label}}, to PromQL
    as_states: bool = False  # a row a series, coloured where it is 1, in place of lines


def _by(label: str, name: str) -> dict[str, str]:
    """One line for each value of a label."""
    return {f"{{{{{label}}}}}": name + RUN}


def _rate(label: str, name: str) -> dict[str, str]:
    return {f"{{{{{label}}}}}": f"sum by ({label}) (rate({name}{RUN}[$__rate_interval]))"}


def _quantile(share: float) -> str:
    """Of the time of steps over a quarter of an hour."""
    return f'quantile_over_time({share}, headrace_trainer_step_seconds{{run="$run", piece="total"}}[15m])'


def _mean_of(seconds: str, count: str) -> str:
    """Mean time of what was counted lately."""
    return f"rate({seconds}{RUN}[$__rate_interval]) / rate({count}{RUN}[$__rate_interval])"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Alarms": (
        Panel(title="Alarms that fire", unit="none", queries={"{{alarm}}": "headrace_gateway_alarm_firing" + RUN}, as_states=True),
        Panel(title="Where samples are", unit="none", queries={"at the engine": f"sum(rate(headrace_gateway_replica_drawing_seconds_total{RUN}[$__rate_interval]))", "waiting for their score": f"sum(rate(headrace_gateway_replica_scoring_seconds_total{RUN}[$__rate_interval]))"}),
        Panel(title="Trainer waits for batches", unit="percentunit", queries={"share of the time": f"rate(headrace_gateway_batch_wait_seconds_total{RUN}[$__rate_interval])"}),
    ),
    "Run": (
        Panel(title="Steps", unit="none", queries={"closed": "headrace_gateway_closed_steps" + RUN}),
        Panel(title="Share of the run that is done", unit="percentunit", queries={"steps": f"headrace_gateway_closed_steps{RUN} / headrace_gateway_wanted_steps{RUN}"}),
        Panel(title="Time since the last step", unit="s", queries={"age": "headrace_gateway_step_age_seconds" + RUN, "oldest open group": "headrace_gateway_oldest_open_seconds" + RUN}),
        Panel(title="Reward", unit="none", queries={"mean": "headrace_trainer_reward_mean" + RUN, "deviation": "headrace_trainer_reward_deviation" + RUN, "{{part}}": "headrace_trainer_reward_part_mean" + RUN}),
        Panel(title="Tokens a second", unit="none", queries=_by("side", "headrace_trainer_tokens_per_second")),
        Panel(title="Idle share", unit="percentunit", queries=_by("side", "headrace_trainer_idle_ratio")),
        Panel(title="Seconds a step", unit="s", queries=_by("piece", "headrace_trainer_step_seconds")),
        Panel(title="Seconds a step, spread over 15 minutes", unit="s", queries={"slowest tenth": _quantile(0.9), "median": _quantile(0.5), "fastest tenth": _quantile(0.1)}),
        Panel(title="Open groups", unit="none", queries={"{{state}}": 'headrace_gateway_groups{run="$run", state=~"open|waiting"}', "at most open": "headrace_gateway_max_open_groups" + RUN}),
        Panel(title="Groups so far", unit="none", queries={"{{state}}": 'headrace_gateway_groups{run="$run", state=~"leased|trained|dropped"}'}),
        Panel(title="Groups dropped, by reason", unit="none", queries=_by("reason", "headrace_gateway_dropped_groups")),
        Panel(title="Staleness of the newest batch (tokens)", unit="none", queries=_by("staleness", "headrace_trainer_staleness_tokens")),
    ),
    "Training": (
        Panel(title="Loss", unit="none", queries={"loss": "headrace_trainer_loss" + RUN, "{{term}}": "headrace_trainer_loss_term" + RUN}),
        Panel(title="Gradient norm", unit="none", queries={"before clipping": "headrace_trainer_grad_norm" + RUN}),
        Panel(title="KL from engine to learner (nats)", unit="none", queries={"k3": "headrace_trainer_kl_nats" + RUN}),
        Panel(title="Entropy (nats)", unit="none", queries={"estimate": "headrace_trainer_entropy_nats" + RUN}),
        Panel(title="Clipped tokens", unit="percentunit", queries=_by("side", "headrace_trainer_clipped_ratio")),
        Panel(title="Mismatch of engine and learner", unit="none", queries={"{{measure}}": 'headrace_trainer_mismatch{run="$run", measure!="ess"}'}),
        Panel(title="Effective sample size (1: all tokens weigh alike)", unit="percentunit", queries={"{{measure}}": 'headrace_trainer_mismatch{run="$run", measure="ess"}'}),
        Panel(title="Completion length (tokens)", unit="none", queries=_by("measure", "headrace_trainer_completion_tokens")),
    ),
    "Rollout": (
        Panel(title="Tokens a second, by replica", unit="none", queries=_rate("name", "headrace_rollout_tokens_total")),
        Panel(title="Requests", unit="none", queries={"{{name}} running": "headrace_rollout_running_requests" + RUN, "{{name}} waiting": "headrace_rollout_waiting_requests" + RUN}),
        Panel(title="Requests a second, by end", unit="none", queries=_rate("end", "headrace_rollout_requests_total")),
        Panel(title="KV cache in use", unit="percentunit", queries=_by("name", "headrace_rollout_kv_use_ratio")),
        Panel(title="Preemptions a second", unit="none", queries=_rate("name", "headrace_rollout_preempted_requests_total")),
        Panel(title="Replicas by state", unit="none", queries=_by("state", "headrace_gateway_replicas")),
    ),
    "Weights": (
        Panel(title="Versions", unit="none", queries={"published": "headrace_gateway_published_version" + RUN, "loaded by {{replica}}": "headrace_gateway_loaded_version" + RUN}),
        Panel(title="Time of a push and of a transfer", unit="s", queries={"push, slowest rank": _mean_of("headrace_gateway_push_seconds_total", "headrace_gateway_push_epochs_total"), "transfer to a replica": _mean_of("headrace_gateway_load_seconds_total", "headrace_gateway_loads_total")}),
        Panel(title="Pushes a second, by outcome", unit="none", queries=_rate("outcome", "headrace_gateway_push_replicas_total")),
        Panel(title="Pause of an update, by piece", unit="s", queries={"{{piece}}": f"sum by (piece) (rate(headrace_gateway_pause_seconds_total{RUN}[$__rate_interval])) / on () group_left () sum (rate(headrace_gateway_loads_total{RUN}[$__rate_interval]))"}),
    ),
    "Reward": (
        Panel(title="Answers a second", unit="none", queries={"{{scorer}} {{outcome}}": f"sum by (scorer, outcome) (rate(headrace_reward_answers_total{RUN}[$__rate_interval]))"}),
        Panel(title="From the cache, a second", unit="none", queries=_rate("scorer", "headrace_reward_cached_answers_total")),
        Panel(title="Circuit breakers (1: open)", unit="none", queries={"{{scorer}} {{upstream}}": "headrace_reward_breaker_ratio" + RUN}),
    ),
    "Machines": (
        Panel(title="GPU use", unit="percentunit", queries={"learner {{gpu}}": "headrace_gateway_gpu_use_ratio" + RUN, "{{name}} {{gpu}}": "headrace_rollout_gpu_use_ratio" + RUN}),
        Panel(title="Imbalance between GPUs (highest less lowest use)", unit="percentunit", queries={"learner": f"max(avg_over_time(headrace_gateway_gpu_use_ratio{RUN}[5m])) - min(avg_over_time(headrace_gateway_gpu_use_ratio{RUN}[5m]))", "replicas": f"max(avg_over_time(headrace_gateway_replica_gpu_use_ratio{RUN}[5m])) - min(avg_over_time(headrace_gateway_replica_gpu_use_ratio{RUN}[5m]))"}),
        Panel(title="GPU memory in use", unit="bytes", queries={"learner {{gpu}}": "headrace_gateway_gpu_used_bytes" + RUN, "{{name}} {{gpu}}": "headrace_rollout_gpu_used_bytes" + RUN}),
        Panel(title="GPU power", unit="watt", queries={"learner {{gpu}}": "headrace_gateway_gpu_power_watts" + RUN, "{{name}} {{gpu}}": "headrace_rollout_gpu_power_watts" + RUN}),
        Panel(title="PCIe traffic of a GPU", unit="Bps", queries={"learner {{gpu}} {{way}}": "headrace_gateway_gpu_pcie_bytes_per_second" + RUN, "{{name}} {{gpu}} {{way}}": "headrace_rollout_gpu_pcie_bytes_per_second" + RUN}),
        Panel(title="NVLink traffic of a GPU", unit="Bps", queries={"learner {{gpu}} {{way}}": f"rate(headrace_gateway_gpu_nvlink_bytes_total{RUN}[$__rate_interval])", "{{name}} {{gpu}} {{way}}": f"rate(headrace_rollout_gpu_nvlink_bytes_total{RUN}[$__rate_interval])"}),
        Panel(title="Memory growth in 15 minutes", unit="bytes", queries={"gateway": 'delta(headrace_gateway_memory_bytes{run="$run", process="service"}[15m])', "rank {{rank}}": f"delta(headrace_trainer_memory_bytes{RUN}[15m])", "{{name}} {{process}}": f"delta(headrace_rollout_memory_bytes{RUN}[15m])", "{{name}}, {{process}}": f"delta(headrace_reward_memory_bytes{RUN}[15m])"}),
        Panel(title="Memory", unit="bytes", queries={"gateway": 'headrace_gateway_memory_bytes{run="$run", process="service"}', "rank {{rank}}": "headrace_trainer_memory_bytes" + RUN, "{{name}} {{process}}": "headrace_rollout_memory_bytes" + RUN, "{{name}}, {{process}}": "headrace_reward_memory_bytes" + RUN}),
        Panel(title="Journal", unit="bytes", queries={"size": "headrace_gateway_journal_bytes" + RUN}),
        Panel(title="Free share of the run folder's disk", unit="percentunit", queries={"free": 'headrace_gateway_disk_bytes{run="$run", measure="free"} / ignoring (measure) headrace_gateway_disk_bytes{run="$run", measure="size"}'}),
        Panel(title="A sync of the journal", unit="s", queries={"mean": f"rate(headrace_gateway_journal_sync_seconds_total{RUN}[$__rate_interval]) / rate(headrace_gateway_journal_syncs_total{RUN}[$__rate_interval])"}),
    ),
}  # fmt: skip


def text() -> str:
    """The dashboard as Grafana reads it."""
    variable = dashboard.QueryVariable("run").label("Run").datasource(SOURCE).query("label_values(headrace_gateway_closed_steps, run)").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    made = dashboard.Dashboard("Headrace").uid("headrace").tags(["headrace"]).refresh("10s").time("now-1h", "now").with_variable(variable)
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(_panel(panel))
    content = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _panel(panel: Panel) -> timeseries.Panel | statetimeline.Panel:
    kind = statetimeline.Panel().thresholds(RED_FROM_1).color_scheme(BY_THRESHOLD) if panel.as_states else timeseries.Panel()
    figure = kind.title(panel.title).unit(panel.unit).datasource(SOURCE).span(WIDTH).height(HEIGHT)
    for letter, (legend, query) in zip("ABCDEFGH", panel.queries.items(), strict=False):
        figure = figure.with_target(prometheus.Dataquery().ref_id(letter).expr(query).legend_format(legend))
    return figure


if __name__ == "__main__":
    FILE.write_text(text())
    sys.stdout.write(f"{FILE}\n")
