"""EnvironmentService: decode, one call, encode."""

from __future__ import annotations

from typing import Any

import grpc

from protos.environment.v1alpha1 import environment_pb2 as pb
from protos.environment.v1alpha1 import environment_pb2_grpc
from rollout_server.environments.desk import Desk
from rollout_server.environments.interface import Action, EnvironmentFailure, Task
from rollout_server.fields import plain

Context = grpc.aio.ServicerContext[Any, Any]


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        task = Task(prompt=request.prompt, fields=plain(request.fields), seed=request.seed)
        try:
            said = await self._desk.reset(request.session_id, request.environment, task)
        except EnvironmentFailure as failure:
            return pb.ResetResponse(failure=_failure(failure))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from None
        return pb.ResetResponse(messages=[pb.Message(**message) for message in said])

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        try:
            step = await self._desk.step(request.session_id, Action(text=request.text, turn=request.turn, cut=request.cut))
        except EnvironmentFailure as failure:
            return pb.StepResponse(failure=_failure(failure))
        except LookupError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except RuntimeError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.StepResponse(messages=[pb.Message(**message) for message in step.observation], reward=step.reward, done=step.done, parts=step.parts)  # type: ignore[arg-type]

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        await self._desk.close(request.session_id)
        return pb.CloseResponse()

    async def ListEnvironments(self, request: pb.ListEnvironmentsRequest, context: Context) -> pb.ListEnvironmentsResponse:
        made = pb.ListEnvironmentsResponse()
        for name, host in self._desk.hosts.items():
            made.environments.add(name=name, num_open=self._desk.num_open(name), num_ended={**host.tally, "idle": self._desk.num_idle[name]})
        return made


def _failure(failure: EnvironmentFailure) -> pb.Failure:
    return pb.Failure(reason=failure.reason, detail=failure.detail)
