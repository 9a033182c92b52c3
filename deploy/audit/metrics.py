"""metrics.jsonl against the journal: each line is one closed batch, with its version, groups and ages, or one evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.audit.accounting import Accounting
from deploy.audit.findings import Findings
from deploy.audit.payload import group_name
from deploy.audit.terms import Close

NEEDED = ("step", "version", "lineage", "groups", "staleness", "leased_groups", "trained_groups", "open_groups", "dropped")
READS, MATCHES, BALANCES = "metrics.jsonl can be read", "metrics match plans", "totals balance"


def read(run_dir: Path, findings: Findings) -> list[tuple[int, dict[str, Any]]]:
    """(line number, line) of every whole line; one that is still being written, at the very end, is left out."""
    path = run_dir / "metrics.jsonl"
    lines = []
    texts = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []
    for number, text in enumerate(texts, start=1):
        try:
            if text:
                line = json.loads(text)
                missing = [name for name in (NEEDED if "evaluation" not in line else NEEDED[:3]) if name not in line]
                if findings.must(not missing, READS, f"metrics.jsonl line {number}", f"has no {', '.join(missing)}"):
                    lines.append((number, line))
        except ValueError as error:
            findings.must(False, READS, f"metrics.jsonl line {number}", str(error))
    return lines


def check(lines: list[tuple[int, dict[str, Any]]], accounting: Accounting, findings: Findings) -> None:
    """Each line against its close, and each close against its line, which only a trainer that died may owe."""
    closes = {close.version: close for close in accounting.closes}
    told: dict[int, int] = {}
    for number, line in lines:
        where = f"metrics.jsonl line {number}"
        if "evaluation" in line:
            accounting.evaluations.told(line, where)
            continue
        findings.must(line["version"] not in told, MATCHES, where, f"version {line['version']} of step {line['step']} is there already, in line {told.get(line['version'])}")
        told[line["version"]] = number
        balance = line["trained_groups"] + sum(line["dropped"].values()) + line["open_groups"]
        findings.must(line["leased_groups"] == balance, BALANCES, where, f"step {line['step']}: {line['leased_groups']} leased, {balance} trained, dropped and open")
        if line["version"] >= accounting.first_told:
            _match(line, closes.get(line["version"]), where, findings)
    last_told = {close.incarnation: close.version for close in accounting.closes if close.version in told}
    for close in accounting.closes:
        unwritten = close.version not in told and close.version < last_told.get(close.incarnation, 0)
        findings.must(not unwritten, MATCHES, close.where, f"step {close.plan.step + 1} (version {close.version}) has no line in metrics.jsonl, though its trainer went on")


def _match(line: dict[str, Any], close: Close | None, where: str, findings: Findings) -> None:
    step = line["step"]
    if not findings.must(close is not None, MATCHES, where, f"step {step}: no batch was closed as version {line['version']}") or close is None:
        return
    findings.must((step - 1, line["lineage"]) == (close.plan.step, close.lineage), MATCHES, where, f"version {line['version']} is step {step} of lineage {line['lineage']}, in the journal step {close.plan.step + 1} of {close.lineage}")
    own = [group_name(seq) for seq in close.plan.groups]
    findings.must(line["groups"] == own, MATCHES, where, f"step {step} trained {' '.join(line['groups'])}, the plan at {close.where} has {' '.join(own)}")
    ages = {int(age): count for age, count in line["staleness"].items()}
    findings.must(ages == dict(close.plan.tokens), MATCHES, where, f"step {step}: tokens by staleness {ages}, the plan says {dict(close.plan.tokens)}")
