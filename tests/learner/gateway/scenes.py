"""How most tests of a whole gateway begin: a trainer on duty that has published its policy, a replica that attends, leases fulfilled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from learner.config import LearnerConfig
from learner.gateway.gateway import Gateway
from protos.learner.v1alpha1 import feed_pb2
from tests.learner.gateway.gateway_harness import Actor, Trainer, running


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A gateway in this process with one trainer and one replica. Example: `async with begun(config, tmp_path) as at: await at.step(0)`"""

    gateway: Gateway
    trainer: Trainer
    actor: Actor
    address: str
    run_dir: Path

    async def sample(self, num_groups: int, *, version: int = 1) -> None:
        """So many groups at most, leased and submitted whole."""
        for lease in await self.actor.lease(max_groups=num_groups, wait_s=0.5):
            await self.actor.fulfil(lease, version=version)

    async def step(self, policy_step: int, *, will_save: bool = False, version: int = 1) -> int:
        """Samples two groups, takes them and closes the step; the version that was published."""
        await self.sample(2, version=version)
        await self.trainer.take(policy_step)
        return (await self.trainer.close(policy_step + 1, will_save=will_save)).version

    async def failed_save(self, policy_step: int) -> None:
        """What rank 0 says of a save that failed."""
        await self.trainer.stub.SaveCut(feed_pb2.SaveCutRequest(incarnation=self.trainer.incarnation, policy_step=policy_step, error="disk full"))


@asynccontextmanager
async def begun(config: LearnerConfig, folder: Path, *, incarnation: int = 100, world_size: int = 1, will_save: bool = False) -> AsyncIterator[Scene]:
    """Version 1 is published and the replica has loaded it. will_save: its save is announced."""
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, folder / "shm", incarnation=incarnation, world_size=world_size), Actor(address, config)
        answer = await trainer.register()
        version = (await trainer.close(answer.policy_step, will_save=will_save)).version
        await actor.attend(loaded_version=version)
        yield Scene(gateway=gateway, trainer=trainer, actor=actor, address=address, run_dir=config.run_dir)
        await actor.leave()
