"""Environments on another server, by gRPC (`use: grpc://host:port`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import Counter
from typing import Any

import grpc
from google.protobuf import struct_pb2

from protos import rpc
from protos.environment.v1alpha1 import environment_pb2 as pb
from protos.environment.v1alpha1 import environment_pb2_grpc
from rollout_server.environment_config import REMOTE, EnvironmentConfig
from rollout_server.environments.host import ENDS
from rollout_server.environments.interface import (
    REASONS,
    Action,
    EnvironmentFailure,
    Message,
    Step,
    Task,
    checked_observation,
    checked_step,
)

logger = logging.getLogger("headrace.rollout.environments")
_AGAIN_S = 0.2
_CLOSE_S = 5.0


class RemoteHost:
    """A Host whose sessions are an environment server's. The channel is opened with the first session."""

    def __init__(self, config: EnvironmentConfig, security: rpc.Security) -> None:
        self.config = config
        self.tally: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self._security = security
        self._places = asyncio.Semaphore(config.max_sessions)
        self._channel: grpc.aio.Channel | None = None
        self._prefix, self._serial = secrets.token_hex(8), itertools.count()

    async def check(self) -> None:
        """Nothing: the server may come later."""

    async def open(self) -> RemoteSession:
        await self._places.acquire()
        if self._channel is None:
            self._channel = rpc.channel(self.config.use.removeprefix(REMOTE), self._security)
        return RemoteSession(self, environment_pb2_grpc.EnvironmentServiceStub(self._channel), f"{self._prefix}-{next(self._serial)}")

    async def stop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def leave(self, failure: EnvironmentFailure | None) -> None:
        self.tally[failure.reason if failure else "closed"] += 1
        self._places.release()


class RemoteSession:
    """A session on the server. Calls are made again while it cannot be reached, within the step's limit: they are idempotent."""

    def __init__(self, host: RemoteHost, stub: Any, session_id: str) -> None:
        self._host, self._stub, self._id = host, stub, session_id
        self._failure: EnvironmentFailure | None = None
        self._is_closed = False

    async def reset(self, task: Task) -> list[Message]:
        fields = struct_pb2.Struct()
        fields.update(dict(task.fields))
        request = pb.ResetRequest(session_id=self._id, environment=self._host.config.name, prompt=task.prompt, fields=fields, seed=task.seed % 2**63)
        answer = await self._call("Reset", request, self._host.config.reset_timeout_s)
        return checked_observation(_messages(answer))

    async def step(self, action: Action) -> Step:
        request = pb.StepRequest(session_id=self._id, turn=action.turn, text=action.text, cut=action.cut)
        answer = await self._call("Step", request, self._host.config.step_timeout_s)
        try:
            return checked_step(Step(observation=_messages(answer), reward=answer.reward if answer.HasField("reward") else None, done=answer.done, parts=dict(answer.parts)))
        except ValueError as error:
            raise self._failed("bad_answer", str(error)) from None

    async def run(self, task: Task, base_url: str, api_key: str) -> float | None:
        raise AssertionError("an agent is never remote: the configuration refuses it")

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._stub.Close(pb.CloseRequest(session_id=self._id), timeout=_CLOSE_S)
        except grpc.aio.AioRpcError as error:
            logger.info("environment %s: session %s is left to its server, which closes it when idle: %s", self._host.config.name, self._id, error.code().name)
        finally:
            self._host.leave(self._failure)

    async def _call(self, method: str, request: Any, limit_s: float) -> Any:
        end_s = asyncio.get_running_loop().time() + limit_s
        while True:
            left_s = end_s - asyncio.get_running_loop().time()
            try:
                answer = await getattr(self._stub, method)(request, timeout=max(0.05, left_s))
                break
            except grpc.aio.AioRpcError as error:
                code, words = error.code(), f"{self._host.config.use}: {error.code().name}: {error.details()}"
            if code == grpc.StatusCode.NOT_FOUND:
                raise self._failed("lost", words)
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._failed("timeout", f"no answer to {method} within {limit_s:g} s ({self._host.config.use})")
            if code != grpc.StatusCode.UNAVAILABLE or left_s < 2 * _AGAIN_S:
                raise self._failed("unavailable" if code == grpc.StatusCode.UNAVAILABLE else "error", words)
            await asyncio.sleep(_AGAIN_S)
        if answer.HasField("failure"):
            reason = answer.failure.reason
            raise self._failed(reason if reason in REASONS else "error", answer.failure.detail)
        return answer

    def _failed(self, reason: Any, detail: str) -> EnvironmentFailure:
        self._failure = EnvironmentFailure(reason, detail)
        return self._failure


def _messages(answer: pb.ResetResponse | pb.StepResponse) -> list[Message]:
    return [{"role": message.role, "content": message.content} for message in answer.messages]
