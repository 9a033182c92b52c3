"""The audit of a real run is clean, and each wrong planted in a copy of it is named."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from typer.testing import CliRunner

from deploy.audit import cuts
from deploy.audit.findings import Findings
from deploy.audit.program import audit
from deploy.audit.segments import read
from deploy.cli import app
from tests.deploy.audit.tampering import Item, copied, entries_of, forged, said, trajectory, written
from tests.redis_server import RedisServer
from tests.system.harness import running

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Four steps of two groups of two with the small engine, to the end; cuts at steps 2 and 4."""
    with running(tmp_path_factory.mktemp("recorded"), tiny_model) as run:
        run.start_reward()
        learner = run.start_learner(steps=4, sampling={"group_size": 2, "max_new_tokens": 6})
        run.start_rollout("only")
        assert learner.process.wait(120) == 0, learner.tail()
        return run.run_dir


def plans(items: list[Item]) -> list[dict]:
    return [record for record, _ in items if record["type"] == "planned"]


def test_a_real_run_is_clean_and_its_table_says_where_every_group_is(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert re.search(r"groups leased +8\n +trained +8", result.output)
    assert re.search(r"cuts +2  step-000002 step-000004", result.output)
    assert result.output.endswith("clean\n")
    assert result.stderr == ""


def test_a_forgers_tools_alone_change_nothing(run_dir: Path, tmp_path: Path) -> None:
    assert forged(run_dir, tmp_path, lambda items: items) == []


def test_a_deleted_group_is_found_though_every_checksum_is_right(run_dir: Path, tmp_path: Path) -> None:
    def change(items: list[Item]) -> list[Item]:
        for plan in plans(items):
            plan["groups"] = [seq for seq in plan["groups"] if seq != 3]
        return [(record, payload) for record, payload in items if record.get("seq") != 3]

    found = forged(run_dir, tmp_path, change)
    assert any(line.startswith("every group is leased once, in order: journal/000000000000.log at ") and "1 are missing, g00000003" in line for line in found)
    assert any(line.startswith("metrics match plans: metrics.jsonl line ") and "g00000003" in line for line in found)


def test_a_group_deleted_from_a_plan_alone_is_found(run_dir: Path, tmp_path: Path) -> None:
    def change(items: list[Item]) -> list[Item]:
        plans(items)[1]["groups"].pop()
        return items

    assert any("a plan's tokens by staleness" in line and "step 1:" in line for line in forged(run_dir, tmp_path, change))


def test_a_group_planned_in_two_steps_is_found(run_dir: Path, tmp_path: Path) -> None:
    def change(items: list[Item]) -> list[Item]:
        first, second = plans(items)[:2]
        second["groups"][0] = first["groups"][0]
        return items

    found = forged(run_dir, tmp_path, change)
    assert any(line.startswith("no group is trained twice: journal/") and "in the batch of step 1 is trained already" in line for line in found)
    assert any("at the end: group g0000000" in line and "trained by 2 steps of the surviving history" in line for line in found)


def test_a_group_twice_in_one_plan_is_found(run_dir: Path, tmp_path: Path) -> None:
    def change(items: list[Item]) -> list[Item]:
        plan = plans(items)[2]
        plan["groups"][1] = plan["groups"][0]
        return items

    assert any("is 2 times in the batch of step 2" in line for line in forged(run_dir, tmp_path, change))


def test_a_duplicated_sample_is_found(run_dir: Path, tmp_path: Path) -> None:
    def change(items: list[Item]) -> list[Item]:
        at = next(index for index, (record, _) in enumerate(items) if record["type"] == "submitted")
        return [*items[: at + 1], items[at], *items[at + 1 :]]

    assert any(line.startswith("a sample is booked once: journal/") and "is booked a second time" in line for line in forged(run_dir, tmp_path, change))


def test_swapped_payloads_of_two_groups_are_found(run_dir: Path, tmp_path: Path) -> None:
    found = forged(run_dir, tmp_path, lambda items: swapped(items, rename=False))
    assert sum("the payload is that of ('g0000000" in line for line in found) == 4


def test_swapped_payloads_are_found_by_their_prompts_even_when_their_names_are_changed_along(run_dir: Path, tmp_path: Path) -> None:
    found = forged(run_dir, tmp_path, lambda items: swapped(items, rename=True))
    assert sum("its prompt is not that of the group" in line for line in found) == 4


def swapped(items: list[Item], *, rename: bool) -> list[Item]:
    """Payloads and facts of groups 0 and 1 change places."""
    of = {(record["seq"], record["sample_index"]): (record, payload) for record, payload in items if record["type"] == "submitted"}
    result = []
    for record, payload in items:
        if record["type"] == "submitted" and record["seq"] < 2:
            other, payload = of[1 - record["seq"], record["sample_index"]]
            if rename:
                parsed = trajectory(payload)
                parsed.group_id = f"g{record['seq']:08d}"
                payload = parsed.SerializeToString()
            record = {**record, "facts": other["facts"]}
        result.append((record, payload))
    return result


def test_two_groups_swapped_between_plans_are_found(run_dir: Path, tmp_path: Path) -> None:
    def change(items: list[Item]) -> list[Item]:
        one, two = plans(items)[2:4]
        one["groups"][0], two["groups"][0] = two["groups"][0], one["groups"][0]
        return items

    found = forged(run_dir, tmp_path, change)
    assert any(line.startswith("metrics match plans: metrics.jsonl line 3: step 3 trained ") for line in found)


def test_a_version_used_twice_is_found(run_dir: Path, tmp_path: Path) -> None:
    def change(items: list[Item]) -> list[Item]:
        records = [record for record, _ in items if record["type"] == "published"]
        records[3]["version"] = records[2]["version"]
        return items

    assert any(line.startswith("versions rise and are never used twice: journal/") and "version 3 of step 3 is published after version 3" in line for line in forged(run_dir, tmp_path, change))


def test_a_token_older_than_the_bound_is_found(run_dir: Path, tmp_path: Path) -> None:
    """The sample of the last batch says it was drawn by version 1, policy step 0: in step 3 that is 3 steps, the bound is 1."""

    def change(items: list[Item]) -> list[Item]:
        seq = plans(items)[3]["groups"][0]
        for index, (record, payload) in enumerate(items):
            if record.get("seq") == seq and record["type"] == "opened":
                record["version"] = 1
            if record.get("seq") == seq and record["type"] == "submitted":
                parsed = trajectory(payload)
                del parsed.spans[1:]
                parsed.spans[0].version, parsed.spans[0].end = 1, len(parsed.completion_ids.data) // 4
                record["facts"]["spans"] = [[1, len(parsed.completion_ids.data) // 4]]
                items[index] = (record, parsed.SerializeToString())
        return items

    found = forged(run_dir, tmp_path, change)
    assert any(line.startswith("no trained token is older than max_staleness: journal/") and "are 3 steps old, max_staleness is 1" in line for line in found)


def test_a_close_without_its_plan_is_found(run_dir: Path, tmp_path: Path) -> None:
    found = forged(run_dir, tmp_path, lambda items: [item for item in items if not (item[0]["type"] == "planned" and item[0]["step"] == 2)])
    assert any("step 3 is closed, but no batch is in training" in line for line in found)


def test_a_payload_that_is_not_there_is_found(run_dir: Path, tmp_path: Path) -> None:
    """The record of one sample is gone, payload and all; its group was trained."""

    def change(items: list[Item]) -> list[Item]:
        at = next(index for index, (record, _) in enumerate(items) if record["type"] == "submitted")
        return items[:at] + items[at + 1 :]

    assert any(line.startswith("plans hold complete open groups, once: journal/") and "of 2" in line for line in forged(run_dir, tmp_path, change))


def test_bit_rot_is_found_where_it_is(run_dir: Path, tmp_path: Path) -> None:
    run = copied(run_dir, tmp_path)
    path = run / "journal" / "000000000000.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = said(run)
    assert re.match(r"the journal can be read: journal/000000000000\.log at \d+: the checksum does not match, though it had been whole once; \d+ bytes are lost", found[0])


def test_a_torn_tail_is_no_finding(run_dir: Path, tmp_path: Path) -> None:
    run = copied(run_dir, tmp_path)
    with (run / "journal" / "000000000000.log").open("ab") as file:
        file.write(b"\xabHRE torn")
    outcome = audit(run)
    assert outcome.findings.found == []
    assert "a torn tail of 9 bytes" in outcome.findings.notes[0]


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("__0_0.distcp", "rot", "the checksum of "),
        ("__0_0.distcp", "cut short", "the file ends at "),
        ("__0_0.distcp", "delete", "the file is missing"),
        (".metadata", "cut short", ".metadata cannot be read"),
        (".metadata", "delete", "there are no weights in it"),
        ("payloads.bin", "cut short", "payloads.bin"),
        ("payloads.bin", "delete", "cannot be read: FileNotFoundError"),
        ("sums-0.json", "delete", "no rank left checksums"),
        (".metadata", "rot", ".metadata: the checksum of the file does not match"),
        ("ledger.msgpack", "cut short", "cannot be read"),
        ("ledger.msgpack", "delete", "cannot be read: FileNotFoundError"),
        ("cut.json", "cut short", "cannot be read"),
    ],
)
def test_a_damaged_cut_is_found(run_dir: Path, tmp_path: Path, name: str, damage: str, complaint: str) -> None:
    run = copied(run_dir, tmp_path)
    path = run / "checkpoints" / "step-000002" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data[: -len(data) // 2] if damage == "cut short" else data)
    if damage == "delete":
        path.unlink()
    found = said(run)
    assert any(line.startswith("a cut is whole: checkpoints/step-000002: ") and complaint in line for line in found), found
    assert not any("step-000004" in line for line in found)


def test_a_cut_that_says_other_than_the_journal_is_found(run_dir: Path, tmp_path: Path) -> None:
    """The publication that the last cut was made after is gone; then a marker says another lineage."""
    run = copied(run_dir, tmp_path)
    mark = run / "checkpoints" / "step-000002" / "cut.json"
    content = json.loads(mark.read_text())
    items = entries_of(run)
    last = max(index for index, (record, _) in enumerate(items) if record["type"] == "published")
    written(run, items[:last] + items[last + 1 :])
    assert any(line.startswith("a cut's account is what the journal made: checkpoints/step-000004: ") for line in said(run))
    written(run, items)
    mark.write_text(json.dumps({**content, "lineage": 1}))
    assert any(line.startswith("a cut's account is what the journal made: checkpoints/step-000002: ") for line in said(run))


def begun_later(run_dir: Path, to: Path) -> Path:
    """The first segment ended before the record of the first cut and is gone, as after a long run."""
    run = copied(run_dir, to)
    mark = run / "checkpoints" / "step-000002" / "cut.json"
    content = json.loads(mark.read_text())
    old = run / "journal" / "000000000000.log"
    whole = old.read_bytes()
    behind = whole[content["offset"] :]
    (run / "journal" / "000000000001.log").write_bytes(whole[:12] + behind)
    old.unlink()
    shift = content["offset"] - 12
    for cut in (run / "checkpoints").iterdir():
        marked = json.loads((cut / "cut.json").read_text())
        (cut / "cut.json").write_text(json.dumps({**marked, "segment": 1, "offset": marked["offset"] - shift}))
    return run


def test_a_journal_that_forgot_its_beginning_is_begun_from_the_oldest_cut(run_dir: Path, tmp_path: Path) -> None:
    outcome = audit(begun_later(run_dir, tmp_path))
    assert outcome.findings.found == []
    assert outcome.accounting.num_trained == 8
    assert "taken from checkpoints/step-000002" in outcome.findings.notes[0]


def test_a_run_that_lets_go_of_a_cut_meanwhile_is_read_again(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal begins behind the start, and the cut to begin from is there only at the second look."""
    run = begun_later(run_dir, tmp_path)
    read_all, looks = cuts.read_all, []

    def first_look_too_late(run_dir: Path, findings: Findings) -> list[cuts.Cut]:
        looks.append(run_dir)
        return [] if len(looks) == 1 else read_all(run_dir, findings)

    monkeypatch.setattr(cuts, "read_all", first_look_too_late)
    assert audit(run).findings.found == []
    assert len(looks) == 2


def test_a_journal_without_its_beginning_and_without_a_cut_is_a_finding(run_dir: Path, tmp_path: Path) -> None:
    run = begun_later(run_dir, tmp_path)
    shutil.rmtree(run / "checkpoints")
    assert any("the journal begins behind the run's start, and there is no cut to begin from" in line for line in said(run))


@pytest.mark.parametrize("gone", ["resolved/learner.json", "journal/000000000000.log"])
def test_a_folder_that_is_no_run_is_the_users_mistake(run_dir: Path, tmp_path: Path, gone: str) -> None:
    run = copied(run_dir, tmp_path)
    (run / gone).unlink()
    result = CliRunner().invoke(app, ["audit", str(run)])
    assert result.exit_code == 2
    assert result.stderr.startswith("headrace: ")
    assert "give the folder of a run" in result.stderr


def test_findings_end_the_command_with_1(run_dir: Path, tmp_path: Path) -> None:
    run = copied(run_dir, tmp_path)
    items = entries_of(run)
    plans(items)[0]["groups"].pop()
    written(run, items)
    result = CliRunner().invoke(app, ["audit", str(run)])
    assert result.exit_code == 1
    assert re.search(r"\d+ findings\n$", result.output)
    assert result.stderr == ""


@pytest.fixture
def in_redis(run_dir: Path, tmp_path: Path) -> Iterator[tuple[Path, Any, str]]:
    """The recorded run as if its journal had been kept in Redis: (run folder, client, name of the stream)."""
    run = copied(run_dir, tmp_path)
    with RedisServer(tmp_path / "redis") as server:
        client: Any = redis.Redis.from_url(server.url)
        name = f"headrace:{{{(run / 'run_id').read_text().strip()}}}:journal"
        moved: dict[int, int] = {}
        for number, entry in enumerate(read(run, Findings()), start=1):
            body = msgpack.packb(entry.record)
            client.xadd(name, {"r": body, "p": entry.payload, "c": zlib.crc32(entry.payload, zlib.crc32(body))}, id=f"1-{number}")
            moved[entry.position[1]] = number
        for mark in (run / "checkpoints").glob("*/cut.json"):
            content = json.loads(mark.read_text())
            mark.write_text(json.dumps({**content, "segment": 1, "offset": moved[content["offset"]]}))
        resolved = run / "resolved" / "learner.json"
        resolved.write_text(json.dumps({**json.loads(resolved.read_text()), "journal": {"backend": "redis", "url": server.url}}))
        shutil.rmtree(run / "journal")
        yield run, client, name


def test_a_journal_in_redis_is_read_as_well(in_redis: tuple[Path, Any, str]) -> None:
    run, client, name = in_redis
    assert said(run) == []
    client.xdel(name, "1-20")
    assert any(line.startswith(f"the journal can be read: {name} entry 1-21: follows 1-19: 1 entries between them are gone") for line in said(run))


def test_bit_rot_in_redis_is_found_where_it_is(in_redis: tuple[Path, Any, str]) -> None:
    run, client, name = in_redis
    ((_, last),) = client.xrevrange(name, count=1)
    client.xadd(name, {**last, b"c": b"1"}, id="1-999999")
    assert f"the journal can be read: {name} entry 1-999999: the checksum does not match" in said(run)


def test_a_trimmed_journal_in_redis_is_begun_from_the_oldest_cut(in_redis: tuple[Path, Any, str]) -> None:
    run, client, name = in_redis
    offset = json.loads((run / "checkpoints" / "step-000002" / "cut.json").read_text())["offset"]
    client.xtrim(name, minid=f"1-{offset}")
    outcome = audit(run)
    assert outcome.findings.found == []
    assert "taken from checkpoints/step-000002" in outcome.findings.notes[0]


def test_a_redis_that_is_not_there_is_the_users_mistake(run_dir: Path, tmp_path: Path) -> None:
    run = copied(run_dir, tmp_path)
    resolved = run / "resolved" / "learner.json"
    resolved.write_text(json.dumps({**json.loads(resolved.read_text()), "journal": {"backend": "redis", "url": "redis://127.0.0.1:1/0"}}))
    result = CliRunner().invoke(app, ["audit", str(run)])
    assert (result.exit_code, result.stderr[:70]) == (2, "headrace: journal.url: no Redis answers at redis://127.0.0.1:1/0 (Error"[:70])


def continued(run_dir: Path, to: Path) -> Path:
    """As if the journal had been lost after the cut of step 2: the rest is told by a new one, which begins with having continued it. In its
    history steps 3 and 4 are the ones that were done before, under versions 1000 higher."""
    run = copied(run_dir, to)
    mark = json.loads((run / "checkpoints" / "step-000002" / "cut.json").read_text())
    entries = [entry for entry in read(run, Findings()) if entry.position > (mark["segment"], mark["offset"])]
    first = {"type": "continued", "step": 2, "segment": mark["segment"], "offset": mark["offset"], "skip": 1000}
    registered = {"type": "registered", "incarnation": 2, "world_size": 1, "cut_dir": "", "policy_step": 2, "lineage": 1}
    published = {"type": "published", "version": 1004, "step": 2, "closed": False, "lineage": 1, "snapshot_dir": "", "will_save": False}
    told = [({**entry.record}, entry.payload) for entry in entries if entry.record["type"] not in ("registered", "assembled")]
    for record, _ in told:
        if record["type"] == "published":
            record |= {"version": record["version"] + 1001, "lineage": 1}
    shutil.rmtree(run / "checkpoints" / "step-000004")
    written(run, [(first, b""), (registered, b""), (published, b""), *told])
    (run / "journal" / "000000000000.log").rename(run / "journal" / "000000000001.log")
    return run


def test_a_journal_that_was_begun_again_from_a_cut_is_followed_from_there(run_dir: Path, tmp_path: Path) -> None:
    """What was opened and drawn under the lost versions keeps their names here, so those are the only findings."""
    outcome = audit(continued(run_dir, tmp_path))
    assert outcome.accounting.lineage == 1
    assert outcome.accounting.first_told == 1004
    assert "taken from checkpoints/step-000002" in outcome.findings.notes[0]
    assert {finding.rule for finding in outcome.findings.found} <= {
        "every group is leased once, in order", "versions rise and are never used twice", "no trained token is older than max_staleness", "a plan's tokens by staleness are those of its samples",
    }  # fmt: skip
