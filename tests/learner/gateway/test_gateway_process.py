"""`python -m learner.gateway` as its supervisor sees it: files, exit codes, one line for a mistake."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from learner.config import LearnerConfig
from protos.learner.v1alpha1 import feed_pb2
from tests.learner.gateway.gateway_harness import ROOT, Actor, Child, Trainer, config_in, eventually, running


async def mistake(config: LearnerConfig) -> tuple[int, list[str]]:
    """Exit code and complaints of a gateway that cannot run."""
    path = config.run_dir.parent / "learner.json"
    path.write_text(config.model_dump_json())
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "learner.gateway", "--config", str(path), cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    text = stderr.decode()
    assert "Traceback" not in text
    assert process.returncode is not None
    return process.returncode, [line for line in text.splitlines() if line.startswith("headrace: ")]


async def test_an_address_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, lines = await mistake(config_in(tmp_path, address=address))
    assert code == 2 and len(lines) == 1 and address in lines[0]


async def test_prompts_that_cannot_be_used_end_it_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    config = config_in(tmp_path, data={"prompts": tmp_path / "prompts.jsonl", "template": "raw", "max_prompt_tokens": 1})
    code, lines = await mistake(config)
    assert code == 2 and len(lines) == 1 and "max_prompt_tokens=1" in lines[0]


async def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    config.run_dir.mkdir()
    (config.run_dir / "run_id").write_text("r7\n")
    code, lines = await mistake(config)
    assert code == 2 and len(lines) == 1 and "run_id=r1" in lines[0] and "r7" in lines[0]


async def test_a_run_that_goes_on_with_other_prompts_is_refused(tmp_path: Path) -> None:
    # faults.md 114
    config = config_in(tmp_path)
    async with running(config) as gateway:
        while not gateway.feed.fingerprint:
            await asyncio.sleep(0.01)
    changed = config_in(tmp_path, num_prompts=7)
    with pytest.raises(ValueError, match="has fingerprint"):
        async with running(changed) as gateway:
            await eventually(lambda: gateway._shelf.failure is not None)


async def test_sigterm_is_exit_code_0_and_the_id_and_address_are_in_the_run_folder(tmp_path: Path) -> None:
    config = config_in(tmp_path, run_id="")
    child = Child(config)
    address = await child.start()
    assert (config.run_dir / "gateway.address").read_text() == f"{address}\n"
    run_id = (config.run_dir / "run_id").read_text()
    assert await child.stop() == 0
    await child.start()
    assert (config.run_dir / "run_id").read_text() == run_id and len(run_id) > 8
    assert await child.stop() == 0


async def test_a_finished_run_tells_the_replicas_and_ends_with_0(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    child = Child(config)
    address = await child.start()
    trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
    await trainer.register()
    await actor.attend(loaded_version=0)
    await trainer.stub.FinishRun(feed_pb2.FinishRunRequest(incarnation=100, error="loss is not finite"))
    assert (await actor.order("run_finished")).reason == "loss is not finite"
    await actor.leave()
    assert child.process is not None
    assert await asyncio.wait_for(child.process.wait(), 30) == 0
