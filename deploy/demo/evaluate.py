"""Greedy accuracy of whatever a rollout server serves: sampled through RolloutService, scored by RewardService. Needs no torch."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass

from google.protobuf import struct_pb2

from protos.arrays import pack_ids, unpack
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.rpc import channel, deadline_s
from protos.trajectory.v1alpha1 import trajectory_pb2

GREEDY = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked and what the scorer compares with.

    Example: `Question(prompt="6 + 5 =", messages=None, answer="11")`
    """

    prompt: str  # as scorers see it, and, without messages, as the model sees it
    answer: str
    messages: list[dict[str, str]] | None = None  # for the model's chat template; None: the prompt as raw text
    begun: str = ""  # start of the answer, given to the model after its template


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One answer and its score.

    Example: `Answered(prompt="6 + 5 =", answer="11", text="6 + 5 = 11", score=1.0, version=7)`
    """

    prompt: str
    answer: str
    text: str
    score: float
    version: int  # newest policy version that drew a token of it; 0: weights that no learner gave
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Accuracy over questions, each asked once.

    Example: 60 of 300 right: `accuracy` 0.2, `standard_error` sqrt(0.2 * 0.8 / 300) = 0.023.
    """

    answered: tuple[Answered, ...]

    @classmethod
    def of_lines(cls, text: str) -> Evaluation:
        """From JSON lines as `to_lines` writes them."""
        records = [json.loads(line) for line in text.splitlines()]
        return cls(answered=tuple(Answered(**{**record, "prompt_ids": tuple(record["prompt_ids"])}) for record in records))

    def to_lines(self) -> str:
        """A JSON object a line for each answer."""
        return "".join(json.dumps(asdict(each)) + "\n" for each in self.answered)

    @property
    def accuracy(self) -> float:
        """Share of answers with a score of 1."""
        return sum(each.score >= 1 for each in self.answered) / len(self.answered)

    @property
    def standard_error(self) -> float:
        """Of the accuracy, binomial."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / len(self.answered))

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions that answered, rising."""
        return tuple(sorted({each.version for each in self.answered}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Examiner:
    """How to ask: addresses, length, scorer.

    Example: `await Examiner(rollout="127.0.0.1:7440", reward="127.0.0.1:7450", scorer="answer", max_new_tokens=12, stop_token_ids=(2,)).ask(questions)`
    """

    rollout: str
    reward: str
    scorer: str
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    concurrency: int = 64

    async def ask(self, questions: Sequence[Question]) -> Evaluation:
        """Raises grpc.aio.AioRpcError when a server cannot answer, RuntimeError when a scorer cannot score."""
        async with channel(self.rollout) as to_rollout, channel(self.reward) as to_reward:
            rollout = rollout_pb2_grpc.RolloutServiceStub(to_rollout)
            room = asyncio.Semaphore(self.concurrency)
            drawn = await asyncio.gather(*(self._draw(rollout, question, room) for question in questions))
            scores = await self._score(reward_pb2_grpc.RewardServiceStub(to_reward), questions, [text for text, _, _ in drawn])
        return Evaluation(
            answered=tuple(
                Answered(prompt=question.prompt, answer=question.answer, text=text, score=scores[index], version=version, prompt_ids=ids)
                for index, (question, (text, version, ids)) in enumerate(zip(questions, drawn, strict=True))
            )
        )

    async def _draw(
        self, rollout: rollout_pb2_grpc.RolloutServiceStub, question: Question, room: asyncio.Semaphore
    ) -> tuple[str, int, tuple[int, ...]]:
        async with room:
            request = _request(question)
            if question.begun:
                begun = await self._generate(rollout, rollout_pb2.GenerateRequest(text=question.begun), 1)
                asked = await self._generate(rollout, request, 1)
                request = rollout_pb2.GenerateRequest(prompt_ids=pack_ids([*asked[2], *begun[2]]))
            text, version, ids = await self._generate(rollout, request, self.max_new_tokens)
            return text, version, ids

    async def _generate(
        self, rollout: rollout_pb2_grpc.RolloutServiceStub, request: rollout_pb2.GenerateRequest, max_new_tokens: int
    ) -> tuple[str, int, tuple[int, ...]]:
        """Text, newest version, prompt ids of one greedy completion."""
        request.sampling.CopyFrom(
            trajectory_pb2.SamplingParams(temperature=GREEDY, top_p=1.0, max_new_tokens=max_new_tokens, stop_token_ids=self.stop_token_ids)
        )
        request.detokenize = True
        text, version = "", 0
        ids: tuple[int, ...] = ()
        async for delta in rollout.Generate(request, timeout=deadline_s("Generate")):
            text = delta.text or text
            version = max([version, *(span.version for span in delta.spans)])
            if delta.HasField("prompt_ids"):
                ids = tuple(int(token) for token in unpack(delta.prompt_ids))
        return text, version, ids

    async def _score(
        self, reward: reward_pb2_grpc.RewardServiceStub, questions: Sequence[Question], texts: list[str]
    ) -> dict[int, float]:
        """Score of each question by its index."""

        async def requests() -> AsyncIterator[reward_pb2.ScoreRequest]:
            for index, (question, text) in enumerate(zip(questions, texts, strict=True)):
                fields = struct_pb2.Struct()
                fields.update({"answer": question.answer})
                yield reward_pb2.ScoreRequest(id=str(index), scorer=self.scorer, prompt=question.prompt, completion=text, fields=fields)

        scores = {}
        async for response in reward.Score(requests(), timeout=600.0):
            if response.reward.WhichOneof("outcome") != "score":
                unscored = response.reward.unscored
                raise RuntimeError(f"question {response.id} was not scored: {trajectory_pb2.UnscoredReason.Name(unscored.reason)}: {unscored.detail}")
            scores[int(response.id)] = response.reward.score.value
        return scores


def _request(question: Question) -> rollout_pb2.GenerateRequest:
    if question.messages is None:
        return rollout_pb2.GenerateRequest(text=question.prompt)
    turns = [rollout_pb2.ChatPrompt.Message(role=turn["role"], content=turn["content"]) for turn in question.messages]
    return rollout_pb2.GenerateRequest(chat=rollout_pb2.ChatPrompt(messages=turns))
