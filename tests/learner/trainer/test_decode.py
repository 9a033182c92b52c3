"""What a rank accepts from the wire."""

from __future__ import annotations

import pytest
import torch

from learner.trainer.decode import checked_batch, decode_entry, decode_sample
from learner.trainer.samples import Sample
from protos import arrays
from protos.learner.v1alpha1 import feed_pb2
from tests.learner.trainer import rig
from tests.learner.trainer.fake_feed import table_row, trajectory


def header(made: list[Sample]) -> feed_pb2.BatchHeader:
    return feed_pb2.BatchHeader(policy_step=3, table=map(table_row, rig.entries(made)), num_rows=len(made))


def test_a_sample_survives_the_wire() -> None:
    for sample in rig.samples(2, 3):
        (decoded,) = decode_sample(trajectory(sample))
        for name in ("prompt_ids", "completion_ids", "behaviour", "loss_mask"):
            assert torch.equal(getattr(decoded, name), getattr(sample, name))


def test_an_empty_mask_means_all_tokens() -> None:
    message = trajectory(rig.samples(1, 1)[0])
    message.ClearField("loss_mask")
    assert bool(decode_sample(message)[0].loss_mask.all())


def test_fewer_log_probs_than_ids_are_refused() -> None:
    # faults.md 49
    message = trajectory(rig.samples(1, 1)[0], logprobs=arrays.pack_floats([-1.0] * 9))
    with pytest.raises(ValueError, match="9 logprobs"):
        decode_sample(message)


def test_a_usable_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="usable but its reward is nan"):
        decode_entry(feed_pb2.TableRow(group_id="g", usable=True, reward=float("nan")))


def test_a_payload_that_is_missing_is_refused_by_name() -> None:
    made = rig.samples(1, 3)
    with pytest.raises(ValueError, match=r"owns 3 usable samples but got 2; missing \[\('g0', 1\)\]"):
        checked_batch(header(made), [trajectory(s) for s in made if s.sample_index != 1], rank=0)


def test_a_payload_of_another_length_than_the_table_says_is_refused() -> None:
    made = rig.samples(1, 2)
    said = header(made)
    said.table[1].num_completion_tokens += 1
    with pytest.raises(ValueError, match=r"\('g0', 1\)"):
        checked_batch(said, [trajectory(s) for s in made], rank=0)


def test_a_rank_keeps_only_what_it_owns_and_can_use() -> None:
    made = rig.samples(1, 3)
    said = header(made)
    said.table[0].owner = 1
    said.table[2].usable = False
    assert [s.sample_index for s in checked_batch(said, [trajectory(made[1])], rank=0).samples] == [1]
