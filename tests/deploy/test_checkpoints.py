"""`headrace checkpoint` and `headrace export` on cuts made as a run makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from deploy.cli import app
from learner.gateway import cuts
from learner.sums import write_sums
from learner.trainer.cut_export import export_cut
from tests.models import tiny_model_in

RUNNER = CliRunner()


def run_in(folder: Path, model_dir: Path, steps: tuple[int, ...] = (1, 2)) -> Any:
    """A run folder with cuts of trained weights; the live model of the last one."""
    (folder / "resolved").mkdir(parents=True)
    (folder / "resolved" / "learner.json").write_text(json.dumps({"model": str(model_dir), "trainer": {"served_dtype": "bfloat16"}}))
    live = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for step in steps:
        with torch.no_grad():
            for parameter in live.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        made = folder / "checkpoints" / f"step-{step:06d}.tmp"
        dcp.save({"model": {name: p.detach() for name, p in live.named_parameters()}, "counters": {"policy_step": torch.tensor(step)}}, checkpoint_id=made, no_dist=True)
        write_sums(made, [".metadata", "__0_0.distcp"], made / "sums-0.json")
        cut = cuts.Cut(folder=cuts.folder_of(folder / "checkpoints", step), run_id="r1", policy_step=step, lineage=0, segment=0, offset=step)
        cuts.write(made, cut, {"account": {}}, [("g00000007", 0)], lambda key: b"p" * 100)
    return live


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp("run")
    model_dir = tiny_model_in(folder, tied=request.param)
    return folder / "run", model_dir, run_in(folder / "run", model_dir)


def command(*words: object) -> tuple[int, str]:
    result = RUNNER.invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def test_an_exported_cut_equals_the_live_policy_in_the_dtype_asked_for(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    # faults.md 118, 119
    run, model_dir, live = made
    out = tmp_path / "out"
    code, said = command("export", run, out)  # the newest cut, in the dtype the run served
    assert code == 0, said
    held = load_file(out / "model.safetensors")
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode  # not for its owner alone
    parameters = dict(live.named_parameters())
    assert set(held) == set(parameters)  # a tied head once, an untied one too
    for name, tensor in held.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, parameters[name].to(torch.bfloat16)), name
    header = int.from_bytes((out / "model.safetensors").read_bytes()[:8], "little")
    assert (out / "model.safetensors").stat().st_size == 8 + header + 2 * sum(p.numel() for p in parameters.values())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (model_dir / name).read_bytes()
    tokenizer, before = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.chat_template == before.chat_template is not None
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    prompt = torch.tensor([tokenizer("7 + 5 = ", add_special_tokens=False).input_ids])
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    rounded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)  # .to(bfloat16) would round the rotary buffers too
    rounded.load_state_dict({name: parameter.to(torch.bfloat16) for name, parameter in parameters.items()}, strict=False)
    assert torch.equal(loaded.generate(prompt, **greedy), rounded.generate(prompt, **greedy))


def test_shards_hold_exactly_what_their_index_names(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    # faults.md 119
    run, model_dir, live = made
    export_cut(cut=run / "checkpoints" / "step-000002", model_dir=model_dir, out_dir=tmp_path / "out", dtype="float32", shard_bytes=100_000)
    files = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    assert all(tensor.numel() for held in files.values() for tensor in held.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(8)[None]
    assert loaded(ids).logits.shape == live(ids).logits.shape
    assert set(dict(loaded.named_parameters())) == set(dict(live.named_parameters()))


def test_exporting_over_something_or_with_another_model_is_refused(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    run, _, _ = made
    (tmp_path / "out").mkdir()
    code, said = command("export", run, tmp_path / "out")
    assert code == 2 and "exists; remove it" in said
    other = tiny_model_in(tmp_path, layers=3)
    code, said = command("export", run, tmp_path / "new", "--model", other)
    assert code == 2 and "is not the model of this cut" in said and not (tmp_path / "new").exists()


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    run_in(tmp_path / "run", tiny_model, (1, 2, 3))
    lines = [{"step": 1, "reward_mean": 0.9}, {"step": 2, "reward_mean": 0.1}, {"step": 3, "reward_mean": 0.4}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "run"


def test_list_and_prune(run: Path) -> None:
    code, said = command("checkpoint", "list", run, "--metric", "reward_mean")
    assert code == 0 and [line.split()[0] for line in said.splitlines()] == ["cut", "step-000001", "step-000002", "step-000003"]
    assert said.splitlines()[1].split()[1] == "1" and said.splitlines()[1].endswith("0.9")
    assert command("checkpoint", "prune", run, "--keep", "0")[0] == 2
    code, said = command("checkpoint", "prune", run, "--keep", "1", "--metric", "reward_mean")
    assert code == 0 and said.split() == ["deleted", str(run / "checkpoints" / "step-000002")]
    assert [cut.policy_step for cut in cuts.all_marked(run / "checkpoints")] == [1, 3]


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("__0_0.distcp", "flip", "another checksum"),
        ("__0_0.distcp", "cut", "bytes, "),
        (".metadata", "remove", ".metadata is missing"),
        ("payloads.bin", "flip", "payloads.bin has another checksum"),
        ("ledger.msgpack", "flip", "ledger.msgpack has another checksum"),
        ("sums-0.json", "remove", "no rank left checksums"),
    ],
)
def test_verify_finds_damage_and_names_the_file(run: Path, name: str, harm: str, words: str) -> None:
    assert command("checkpoint", "verify", run) == (0, "3 cuts are whole\n")
    path = run / "checkpoints" / "step-000002" / name
    data = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    code, said = command("checkpoint", "verify", run)
    assert code == 1 and words in said and "step-000002" in said and "step-000003" not in said


def test_a_damaged_cut_is_not_exported(run: Path, tmp_path: Path) -> None:
    path = run / "checkpoints" / "step-000003" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    code, said = command("export", run, tmp_path / "out")
    assert code == 2 and "is damaged" in said


def test_a_folder_without_cuts_is_the_users_mistake(tmp_path: Path) -> None:
    for words in (("checkpoint", "list", tmp_path), ("checkpoint", "verify", tmp_path / "none"), ("export", tmp_path, tmp_path / "out")):
        assert command(*words)[0] == 2
