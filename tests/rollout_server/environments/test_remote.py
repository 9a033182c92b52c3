"""Environments on a server of their own, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from protos import rpc
from protos.environment.v1alpha1 import environment_pb2 as pb
from protos.environment.v1alpha1 import environment_pb2_grpc
from rollout_server.environment_config import EnvironmentConfig
from rollout_server.environments.config import EnvironmentServerConfig
from rollout_server.environments.desk import Desk
from rollout_server.environments.host import ProcessHost
from rollout_server.environments.interface import Action, EnvironmentFailure, Task
from rollout_server.environments.remote import RemoteHost
from rollout_server.environments.servicer import EnvironmentServicer

HERE = "tests.rollout_server.environments.plugins"
Serve = Callable[..., Awaitable[tuple[RemoteHost, Desk, Any]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """serve(idle_s, **config): a host whose sessions are played by a server, the server's desk, and a bare stub."""
    ends: list[Callable[[], Awaitable[None]]] = []

    async def begin(idle_s: float = 60.0, **values: Any) -> tuple[RemoteHost, Desk, Any]:
        own = ProcessHost(EnvironmentConfig(name="e", use=f"{HERE}:Bad", **{"step_timeout_s": 0.5, **values}))
        desk = Desk({"e": own}, idle_s=idle_s)
        servicer = EnvironmentServicer(desk)
        server = rpc.Server("127.0.0.1:0", [lambda s: environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer, s)])
        await server.start()
        sweeping = asyncio.create_task(desk.sweep())
        host = RemoteHost(EnvironmentConfig(name="e", use=f"grpc://127.0.0.1:{server.port}", step_timeout_s=3, reset_timeout_s=20), rpc.OPEN)
        channel = rpc.channel(f"127.0.0.1:{server.port}")

        async def end() -> None:
            sweeping.cancel()
            await host.stop()
            await channel.close()
            await server.stop(0)
            await desk.stop()

        ends.append(end)
        return host, desk, environment_pb2_grpc.EnvironmentServiceStub(channel)

    yield begin
    for end in ends:
        await end()


async def test_a_session_is_played_over_the_wire_and_its_failures_keep_their_types(serve: Serve) -> None:
    host, desk, stub = await serve()
    session = await host.open()
    assert await session.reset(Task(prompt="go", fields={"n": 3}, seed=2**62)) == [{"role": "user", "content": "go"}]
    first, last = await session.step(Action(text="a", turn=0)), await session.step(Action(text="b", turn=1))
    assert (first.observation, first.reward, first.done) == ([{"role": "user", "content": " and?"}], 1.0, False) and last.done
    await session.close()
    for how, reason in (("raise", "error"), ("hang", "timeout"), ("exit", "died"), ("nan", "bad_answer")):
        session = await host.open()
        await session.reset(Task(prompt="go", fields={"how": how}, seed=1))
        with pytest.raises(EnvironmentFailure) as failure:
            await session.step(Action(text="a", turn=0))
        await session.close()
        assert failure.value.reason == reason and host.tally[reason] == 1
    listed = (await stub.ListEnvironments(pb.ListEnvironmentsRequest())).environments
    assert [(e.name, e.num_open, e.num_ended["closed"], e.num_ended["timeout"]) for e in listed] == [("e", 0, 1, 1)] and desk.num_open("e") == 0


async def test_calls_that_are_made_again_get_the_same_answer(serve: Serve) -> None:
    _, _, stub = await serve()
    reset = pb.ResetRequest(session_id="s", environment="e", prompt="go")
    assert await stub.Reset(reset) == await stub.Reset(reset)
    step = pb.StepRequest(session_id="s", turn=0, text="a")
    assert await stub.Step(step) == await stub.Step(step)
    assert (await stub.Step(pb.StepRequest(session_id="s", turn=1, text="b"))).done  # the world went on by one turn and not by two
    for request, code, words in (
        (pb.StepRequest(session_id="s", turn=5), grpc.StatusCode.FAILED_PRECONDITION, "turn 2 is due"),
        (pb.StepRequest(session_id="other", turn=0), grpc.StatusCode.NOT_FOUND, "there is no session 'other'"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Step(request)
        assert refusal.value.code() == code and words in str(refusal.value.details())
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Reset(pb.ResetRequest(session_id="t", environment="none"))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "one of e" in str(refusal.value.details())
    await stub.Close(pb.CloseRequest(session_id="s"))
    await stub.Close(pb.CloseRequest(session_id="s"))


async def test_a_session_whose_caller_is_gone_is_closed(serve: Serve) -> None:
    host, desk, _ = await serve(idle_s=0.3)
    session = await host.open()
    await session.reset(Task(prompt="go", fields={}, seed=1))
    async with asyncio.timeout(20):
        while desk.num_open("e"):
            await asyncio.sleep(0.05)
    assert desk.num_idle["e"] == 1
    with pytest.raises(EnvironmentFailure, match="lost: grpc://"):
        await session.step(Action(text="a", turn=0))
    await session.close()


async def test_a_server_that_is_not_there_makes_its_samples_unusable_in_time() -> None:
    host = RemoteHost(EnvironmentConfig(name="e", use="grpc://127.0.0.1:9", reset_timeout_s=1.0), rpc.OPEN)
    session = await host.open()
    with pytest.raises(EnvironmentFailure) as failure:
        await asyncio.wait_for(session.reset(Task(prompt="go", fields={}, seed=1)), 20)
    assert failure.value.reason in ("unavailable", "timeout")
    await session.close()
    await host.stop()


def test_what_a_server_cannot_play_is_refused() -> None:
    from pydantic import ValidationError

    for environment, words in (({"name": "a", "use": "grpc://h:1"}, "plays environments itself"), ({"name": "a", "use": "m:f", "agent": True}, "plays environments itself")):
        with pytest.raises(ValidationError, match=words):
            EnvironmentServerConfig.model_validate({"environments": [environment]})
