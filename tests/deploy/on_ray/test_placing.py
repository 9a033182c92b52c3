"""Which room each process is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deploy.on_ray.placing import bundle_of, groups_of, missing
from deploy.processes import Process, Role


def process(name: str, role: Role) -> Process:
    return Process(name=name, role=role, config={}, log=Path("log"), wants="", wants_metrics="")


RUN = [process("reward-0", "reward"), process("rollout-0", "rollout"), process("rollout-1", "rollout"), process("learner", "learner")]


def test_a_role_is_a_placement_group_with_a_bundle_a_process() -> None:
    groups = groups_of(RUN, {"learner": 4, "rollout": 2}, {"learner": "train"})
    assert [(group.name, group.strategy, group.members) for group in groups] == [
        ("reward", "SPREAD", ("reward-0",)), ("rollout", "SPREAD", ("rollout-0", "rollout-1")), ("learner", "PACK", ("learner",)),
    ]  # fmt: skip
    assert groups[1].bundles == ({"CPU": 1.0, "GPU": 2.0},) * 2
    assert groups[2].bundles == ({"CPU": 1.0, "GPU": 4.0, "headrace-train": 0.001},)


def test_a_process_without_gpus_asks_for_none() -> None:
    assert bundle_of(RUN[0], {"learner": 4}, {}) == {"CPU": 1.0}


def test_a_cluster_that_is_too_small_is_told_with_both_numbers() -> None:
    groups = groups_of(RUN, {"learner": 4, "rollout": 2}, {})
    # GPUs: 4 of the learner and 2 x 2 of the replicas; CPUs: one of each of the four processes.
    assert missing(groups, {"CPU": 4.0, "GPU": 8.0}) == ""
    assert missing(groups, {"CPU": 3.0, "GPU": 6.0}) == "CPU: 4 wanted, 3 there; GPU: 8 wanted, 6 there"
    assert missing(groups, {"CPU": 4.0}) == "GPU: 8 wanted, 0 there"


def test_one_device_more_than_there_are_and_sixty_processors_of_sixteen_are_told_apart() -> None:  # faults.md 129
    assert missing(groups_of(RUN, {"learner": 5, "rollout": 2}, {}), {"CPU": 16.0, "GPU": 8.0}) == "GPU: 9 wanted, 8 there"
    many = [replace(RUN[0], name=f"{RUN[0].name}-{number}") for number in range(60)]
    assert missing(groups_of(many, {}, {}), {"CPU": 16.0, "GPU": 0.0}) == "CPU: 60 wanted, 16 there"
