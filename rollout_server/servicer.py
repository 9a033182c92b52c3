"""RolloutService: decode, one call, encode. A client that goes away takes its request with it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import grpc

from protos.arrays import pack_floats, pack_ids, unpack
from protos.identity import sample_seed
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2
from protos.weights.mirror import Mirror
from rollout_server.engine import EngineUnavailableError, SamplingSpec
from rollout_server.replica import Replica
from rollout_server.tokens import Tokens
from rollout_server.usable import unusable_reason
from rollout_server.weights.driver import CommitError
from rollout_server.weights.fetching import lost, serve
from rollout_server.wire import FINISH, effective, sampling_spec, version_spans

Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, replica: Replica, tokens: Tokens, *, mirror: Mirror, replica_id: str, model: str, learner: str, refused: Callable[[], int] = lambda: 0) -> None:
        self._mirror = mirror
        self._replica = replica
        self._tokens = tokens
        self._replica_id = replica_id
        self._model = model
        self._learner = learner
        self._refused = refused  # what the server in front has refused
        self._serial = itertools.count()
        self._entropy = secrets.randbits(64)  # of seeds that requests leave to the server
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        try:
            prompt_ids = await self._prompt_ids(request)
            spec = sampling_spec(request.sampling, seed=request.sampling.seed or self._fresh_seed(), end_token=self._tokens.end_token)
            async with aclosing(self._stream(prompt_ids, spec, request)) as responses:
                async for response in responses:
                    yield response
        except ValueError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except EngineUnavailableError as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, error)

    def _fresh_seed(self) -> int:
        """One that no other request has, here or at another replica."""
        return sample_seed(self._entropy, next(self._serial)) or 1

    async def _stream(self, prompt_ids: list[int], spec: SamplingSpec, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        drawn: list[int] = []
        logprobs: list[float] = []
        request_id = f"generate-{next(self._serial)}"
        async with aclosing(self._replica.generate(prompt_ids, spec, request_id, stream=not request.whole)) as deltas:
            async for delta in deltas:
                response = pb.GenerateResponse(token_ids=pack_ids(delta.token_ids), logprobs=pack_floats(delta.logprobs))
                if not drawn:
                    room_tokens = self._replica.engine.info.max_model_len - len(prompt_ids)
                    response.effective_sampling.CopyFrom(effective(spec, room_tokens=room_tokens))
                    response.prompt_ids.CopyFrom(pack_ids(prompt_ids))
                drawn += delta.token_ids
                logprobs += delta.logprobs
                if request.detokenize:
                    response.text = self._tokens.text(drawn)
                if delta.finish is not None:
                    response.finish_reason = FINISH[delta.finish]
                    response.spans.extend(version_spans(delta.spans))
                    response.unusable_reason = unusable_reason(drawn, logprobs, num_known=self._tokens.size)
                yield response

    async def _prompt_ids(self, request: pb.GenerateRequest) -> list[int]:
        """Text is encoded in a thread: megabytes of it take a minute, in which this loop must go on sending heartbeats."""
        match request.WhichOneof("prompt"):
            case "prompt_ids":
                if request.prompt_ids.dtype != trajectory_pb2.PACKED_DTYPE_INT32:
                    raise ValueError(f"prompt_ids must be packed int32, got dtype {request.prompt_ids.dtype}")
                return [int(token) for token in unpack(request.prompt_ids)]
            case "text":
                self._check_length(len(request.text))
                return await asyncio.get_running_loop().run_in_executor(self._encoding, self._tokens.encode, request.text)
            case "chat":
                turns = [(message.role, message.content) for message in request.chat.messages]
                self._check_length(sum(len(content) for _, content in turns))
                return await asyncio.get_running_loop().run_in_executor(self._encoding, self._tokens.chat, turns)
            case _:
                raise ValueError("the request has no prompt: set prompt_ids, text or chat")

    def _check_length(self, num_characters: int) -> None:
        """Raises ValueError for a text that is too long whatever its tokens are, EngineUnavailableError while the limit is not known."""
        if not self._replica.life:
            raise EngineUnavailableError(self._replica.detail)
        max_model_len = self._replica.engine.info.max_model_len
        longest = max_model_len * self._tokens.longest
        if num_characters > longest:
            raise ValueError(f"the prompt has {num_characters} characters, and max_model_len={max_model_len} tokens of at most {self._tokens.longest} characters hold {longest}; shorten it")

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        replica, state = self._replica, self._replica.state
        response = pb.GetStatusResponse(
            replica_id=self._replica_id, state=state, detail=replica.detail, model=self._model, learner=self._learner,
            loaded_version=replica.engine.loaded_version, num_running=replica.num_running,
            num_tokens=replica.engine.stats().num_tokens, num_refused=self._refused(),
        )  # fmt: skip
        if replica.life:
            response.engine, response.max_model_len = replica.engine.info.name, replica.engine.info.max_model_len
        return response

    async def FetchWeights(self, request: pb.FetchWeightsRequest, context: Context) -> AsyncIterator[pb.FetchWeightsResponse]:
        try:
            async for response in serve(self._mirror, request.have_version, request.have_layout):
                yield response
        except (LookupError, InterruptedError) as error:
            await _abort(context, lost(error), error)

    async def LoadWeights(self, request: pb.LoadWeightsRequest, context: Context) -> pb.LoadWeightsResponse:
        if self._replica.attends:
            message = f"this replica attends the learner at {self._learner}: its weights are the learner's matter"
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        try:
            times = await self._replica.load_folder(_folder(request.path))
        except ValueError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except (CommitError, EngineUnavailableError) as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, error)
        return pb.LoadWeightsResponse(pause_s=times.pause_s)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        return pb.DrainResponse(num_aborted=await self._replica.drain(request.grace_s))


def _folder(path: str) -> Path:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{path!r} is no Hugging Face folder on this machine: {folder / 'config.json'} does not exist")
    return folder


async def _abort(context: Context, code: grpc.StatusCode, error: Exception | str) -> NoReturn:
    await context.abort(code, str(error))
    raise AssertionError("abort raises")
