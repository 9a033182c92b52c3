"""`python -m reward_server` alone answers a plain gRPC client: no learner, no rollout server, no module of ours but the contract."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.reward_server.service import serving

MINE = '''
async def shout(prompt, completion, fields, *, loud=1.0):
    """Share of capitals."""
    return loud * sum(c.isupper() for c in completion) / len(completion)
'''


def test_a_plain_client_gets_scores_from_a_file_of_functions_and_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = {"scorers": [{"name": "shout", "use": "mine:shout", "args": {"loud": 2.0}}, {"name": "sums", "use": "last_number"}]}
    with serving(tmp_path, config) as (address, _), grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert health.status == health_pb2.HealthCheckResponse.SERVING

        stub = RewardServiceStub(channel)
        sums = pb.ScoreRequest(id="2", scorer="sums", prompt="6 + 5?", completion="6 + 5 = 11.")
        sums.fields.update({"answer": 11})
        requests = [pb.ScoreRequest(id="1", completion="ABcd"), sums, pb.ScoreRequest(id="3", completion="")]
        answers = {answer.id: answer.reward for answer in stub.Score(iter(requests), timeout=20)}
        assert answers["1"].score.value == 1.0 and answers["1"].scorer == "shout"  # 2.0 * 2 / 4
        assert answers["2"].score.value == 1.0
        assert answers["3"].unscored.reason == trajectory_pb2.UNSCORED_REASON_ERROR
        assert answers["3"].unscored.detail == "ZeroDivisionError: float division by zero"

        listed = stub.ListScorers(pb.ListScorersRequest(), timeout=30)
        assert listed.default_scorer == "shout"
        assert [(each.name, each.description, each.num_answered, each.num_unscored) for each in listed.scorers] == [
            ("shout", "Share of capitals.", 2, 1),
            ("sums", "1 when the completion's last number is the record's answer (within `tolerance`), else 0.", 1, 0),
        ]
