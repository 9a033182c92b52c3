"""cluster and roles: devices are counted once, products match, sharing is said, memory fits; each mistake names file, line, key, and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.backends import check
from deploy.cluster.config import ClusterConfig, Communication, Roles
from deploy.cluster.devices import Device, devices_of
from deploy.cluster.dimensions import cuts_of
from deploy.cluster.fits import needs_of
from deploy.cluster.memory import GIB
from deploy.cluster.shape import counted
from deploy.mistakes import Mistakes
from deploy.schema import load, parse, with_overrides
from protos.stacks import RUN_VARIABLE

SIZES = {"parameters_b": 4.0, "layers": 36, "hidden": 2560, "heads": 32, "kv_heads": 8, "head_width": 128, "vocab": 150_000}


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A run that is right: 8 GPUs, half of them train, half sample in pairs."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    return {
        "run_dir": str(tmp_path / "run"), "model": "someone/model-4b", "model_sizes": {"someone/model-4b": SIZES},
        "cluster": {
            "node_groups": [{"name": "here", "gpus_per_node": 8, "gpu": "h100"}],
            "gpu_groups": {"train": {"nodes": "here", "gpus_per_node": 4}, "sample": {"nodes": "here", "gpus_per_node": 4}},
        },
        "roles": {"actor": {"gpu_group": "train", "parallelism": {"shard": 4}}, "rollout": {"gpu_group": "sample", "parallelism": {"data": 2, "tensor": 2}}},
        "learner": {"data": {"prompts": str(tmp_path / "train.jsonl")}, "trainer": {"device": "cuda", "compute_dtype": "bfloat16", "served_dtype": "bfloat16", "row_tokens": 8192, "recompute": "full"}},
        "rollout": {"dtype": "bfloat16", "max_model_len": 4096, "gpu_memory_fraction": 0.8},
        "reward": {"scorers": [{"name": "answer", "use": "last_number"}]},
    }  # fmt: skip


def test_roles_say_how_many_there_are_and_who_sees_which_gpu(content: dict[str, Any]) -> None:
    run = parse(content, where="run.yaml")
    assert (run.learner.trainer.ranks, run.rollout.replicas, run.rollout.tensor_parallel) == (4, 2, 2)
    assert run.placement.learner_gpus == (0, 1, 2, 3) and run.placement.rollout_gpus == ((4, 5), (6, 7))
    assert run.num_gpus() == {"learner": 4, "rollout": 2} and run.machines_of() == {"learner": "here", "ranks": "here", "rollout": "here"}


def test_a_replica_is_cut_by_pipeline_and_engines_too(content: dict[str, Any]) -> None:
    run = parse(with_overrides(content, {"roles.rollout.parallelism": {"pipeline": 2, "engines": 2}}), where="run.yaml")
    rollout = run.rollout
    assert (rollout.replicas, rollout.tensor_parallel, rollout.pipeline_parallel, rollout.engines) == (1, 1, 2, 2)
    assert run.placement.rollout_gpus == ((4, 5, 6, 7),) and run.num_gpus()["rollout"] == 4
    sample = needs_of(run)["sample"][0]
    terms = {term.name: term for term in sample.terms}
    # half of the layers' weights rest on each GPU, all of them are staged there; a GPU's cache holds half of the layers
    assert terms["weights"].gib == pytest.approx(2 * 4e9 / 2 / GIB) and terms["staging of an update"].gib == pytest.approx(2 * 4e9 / GIB)
    cache = 0.8 * 80 - 2 * 4e9 / 2 / GIB - 2
    assert sample.tokens == pytest.approx(cache * GIB / (2 * 36 * 8 * 128 * 2 / 2))


def test_placement_lists_the_gpus_of_all_engines(content: dict[str, Any]) -> None:
    plain = {key: value for key, value in content.items() if key not in ("cluster", "roles")}
    asked = {"rollout.tensor_parallel": 2, "rollout.pipeline_parallel": 2, "rollout.engines": 2, "placement.rollout_gpus": [[0, 1]]}
    with pytest.raises(Mistakes, match="rollout.tensor_parallel=2 x pipeline_parallel=2 x engines=2: as many GPUs as their product; list 8"):
        parse(plain, where="x", overrides=asked)
    assert parse(plain, where="x", overrides={**asked, "placement.rollout_gpus": [list(range(8))]}).rollout.num_workers == 8


def test_what_a_dimension_leaves_open_follows_from_the_gpus(content: dict[str, Any]) -> None:
    run = parse(with_overrides(content, {"roles.actor.parallelism": {}, "roles.rollout.parallelism": {"tensor": 2}}), where="run.yaml")
    assert (run.learner.trainer.ranks, run.rollout.replicas) == (4, 2)


def test_every_gpu_is_counted_once() -> None:
    sizes = {"a": (None, 3), "b": (1, 4), "c": (1, 5), "d": (1, 1)}
    groups = {name: {"nodes": "x", "num_nodes": count, "gpus_per_node": gpus} for name, (count, gpus) in sizes.items()}
    cluster = ClusterConfig.model_validate({"node_groups": [{"name": "x", "count": 2, "gpus_per_node": 8}], "gpu_groups": groups})
    found = devices_of(cluster)
    # a: 0 to 2 of both machines; b: 3 to 6 of the first; c: five, which only the second has left; d: the first's last one.
    assert found["a"] == tuple(Device(nodes="x", node=node, gpu=gpu) for node in (0, 1) for gpu in (0, 1, 2))
    assert [(device.node, device.gpu) for device in found["b"]] == [(0, gpu) for gpu in range(3, 7)]
    assert [(device.node, device.gpu) for device in found["c"]] == [(1, gpu) for gpu in range(3, 8)]
    assert [(device.node, device.gpu) for device in found["d"]] == [(0, 7)]
    every = [device for devices in found.values() for device in devices]
    assert len(every) == len(set(every)) == 16


MACHINES_OF_SIX = {
    "node_groups": [{"name": "here", "gpus_per_node": 4}, {"name": "there", "count": 2, "gpus_per_node": 6}],
    "gpu_groups": {"train": {"nodes": "here", "gpus_per_node": 4}, "sample": {"nodes": "there", "gpus_per_node": 6}},
}
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"cluster.gpu_groups.sample.gpus_per_node": 5}, ["cluster.gpu_groups.sample: 5 GPUs on 1 machines of node group here (1 x 8 GPUs), of which train has 4 on each", "counted once"]),
    ({"cluster.gpu_groups.sample.nodes": "there"}, ["cluster.gpu_groups.sample.nodes=there: none of cluster.node_groups ['here']"]),
    ({"roles.rollout.gpu_group": "judge"}, ["roles.rollout.gpu_group=judge: none of cluster.gpu_groups ['train', 'sample']"]),
    ({"roles.rollout.gpu_group": "train"}, ["roles.rollout.gpu_group=train: actor and rollout would share its GPUs", "say shared: true"]),
    ({"cluster.gpu_groups.train.shared": True}, ["cluster.gpu_groups.train.shared=true: only actor uses it"]),
    ({"roles.rollout.parallelism": {"data": 3}}, ["roles.rollout.parallelism: data 3 = 3, and gpu_group sample has 4 GPUs"]),
    ({"roles.actor.parallelism": {"shard": 2, "tensor": 2}}, ["roles.actor.parallelism.tensor=2: the learner does not have this dimension yet, it has shard"]),
    ({"roles.actor.parallelism": {"pipeline": 4}}, ["roles.actor.parallelism.pipeline=4: the learner does not have"]),
    ({"roles.actor.parallelism": {"context": 4}}, ["roles.actor.parallelism.context=4: the learner does not have"]),
    ({"roles.actor.parallelism": {"replicate": 4}}, ["roles.actor.parallelism.replicate=4: the learner does not have"]),
    ({"roles.actor.parallelism": {"engines": 4}}, ["roles.actor.parallelism.engines=4: the learner does not have this dimension yet, it has shard; a replica alone has several"]),
    ({"roles.rollout.parallelism": {"context": 4}}, ["roles.rollout.parallelism.context=4: a replica does not have this dimension yet, it has data and tensor and pipeline and engines"]),
    ({"roles.rollout.parallelism": {"pipeline": 2, "engines": 3}}, ["roles.rollout.parallelism: pipeline 2 x engines 3 = 6, and gpu_group sample has 4 GPUs"]),
    # 6 GPUs on each of two machines, in fours: the second replica would have two of each
    ({"cluster": MACHINES_OF_SIX, "roles.rollout.parallelism": {"tensor": 2, "pipeline": 2}}, ["roles.rollout.parallelism: one replica has 4 GPUs, and gpu_group sample has 6 on a machine: it would lie on two machines", "divides 6"]),
    ({"cluster": MACHINES_OF_SIX, "roles.rollout.parallelism": {"engines": 12}}, ["roles.rollout.parallelism: one replica has 12 GPUs, and gpu_group sample has 6 on a machine"]),
    ({"rollout.pipeline_parallel": 2}, ["rollout.pipeline_parallel=2 and roles say 1", "remove rollout.pipeline_parallel"]),
    ({"roles.critic": {"gpu_group": "sample"}}, ["roles.critic.gpu_group=sample: the learner does not have a critic on GPUs of its own yet"]),
    ({"cluster.node_groups": [{"name": "here", "gpus_per_node": 8, "role": "trainer"}]}, ["roles.rollout: runs on node group here, whose role is trainer"]),
    ({"roles": None}, ["cluster: cluster and roles go together", "add roles"]),
    ({"placement": {"learner_gpus": [0]}}, ["placement: roles say who sees which GPU; remove placement"]),
    ({"learner.trainer.ranks": 8}, ["learner.trainer.ranks=8 and roles say 4", "remove learner.trainer.ranks"]),
    ({"rollout.scale": {"least": 1, "most": 3}}, ["rollout.scale.most=3 and roles.rollout.parallelism.data=2"]),
    # 0.072 x 80 - 3.73 - 2 = 0.03 GiB, of 72 KiB a token and GPU: a few hundred tokens.
    ({"rollout.gpu_memory_fraction": 0.072}, ["rollout.gpu_memory_fraction=0.072: the KV cache would have room for", "less than one sample of rollout.max_model_len=4096"]),
    # 4 B of bfloat16 on 2 GPUs are 3.7 GiB; 0.98 x 80 and these for staging are 82.
    ({"rollout.gpu_memory_fraction": 0.98}, ["cluster.gpu_groups.sample: a GPU would have to hold about 82 GiB and has 80", "0.98 x 80 - 3.7", "smaller rollout.gpu_memory_fraction"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), CASES, ids=lambda value: next(iter(value)))
def test_what_cannot_be_laid_out_is_one_line_with_its_values_and_the_way_out(content: dict[str, Any], overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Mistakes) as caught:
        parse(content, where="run.yaml", overrides=overrides)
    assert len(caught.value.lines) == 1, caught.value.lines
    assert all(word in caught.value.lines[0] for word in words), caught.value.lines[0]


def test_a_mistake_names_file_line_and_key(content: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(with_overrides(content, {"cluster.gpu_groups.sample.gpus_per_node": 5, "learner.steps": 0}), sort_keys=False))
    number = next(index for index, line in enumerate(file.read_text().splitlines(), 1) if line == "    sample:")
    with pytest.raises(Mistakes) as caught:
        load(file)
    assert caught.value.lines[0].startswith(f"{file}:{number}: cluster.gpu_groups.sample: ")


def test_memory_is_estimated_with_its_arithmetic(content: dict[str, Any]) -> None:
    needs = needs_of(parse(content, where="run.yaml"))
    terms = {term.name: term for term in needs["train"][0].terms}
    assert terms["actor weights"].gib == pytest.approx(4 * 4e9 / 4 / GIB)  # float32, a quarter on each rank
    assert terms["actor AdamW's moments"].gib == pytest.approx(8 * 4e9 / 4 / GIB) and terms["actor AdamW's moments"].words == "8 B x 4.00 B / 4"
    # recompute=full: each of 36 layers keeps its input, 2 B x 8192 x 2560, and one is whole, 34 B x 8192 x 2560
    assert terms["activations"].gib == pytest.approx((36 * 2 + 34) * 8192 * 2560 / GIB)
    sample = needs["sample"][0]
    cache = 0.8 * 80 - 2 * 4e9 / 2 / GIB - 2  # the engine's share without weights and CUDA
    assert sample.tokens == pytest.approx(cache * GIB / (2 * 36 * 8 * 128 * 2 / 2))


def test_weights_of_a_folder_are_counted() -> None:
    # SmolLM2-135M: 30 layers of 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576, a tied embedding of 49152 * 576, a norm of 576.
    sizes = {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "head_width": 64, "vocab": 49152, "intermediate": 1536, "tied": True}
    assert counted(sizes) == 134_515_008


def test_communication_becomes_the_environment_of_every_process(content: dict[str, Any]) -> None:
    run = parse(content, where="x", overrides={"cluster.communication": {"rdma_enabled": False, "interface": "eth1", "nccl": {"NCCL_DEBUG": "INFO", "NCCL_NTHREADS": 256}}})
    assert {name: value for name, value in run.environment().items() if name != RUN_VARIABLE} == {
        "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO", "NCCL_NTHREADS": "256", "HEADRACE_LOG_LEVEL": "info",
    }  # fmt: skip
    with pytest.raises(ValueError, match="both say the same thing"):
        Communication.model_validate({"interface": "eth0", "nccl": {"NCCL_SOCKET_IFNAME": "eth1"}})
    with pytest.raises(ValueError, match="not a variable of NCCL"):
        Communication.model_validate({"nccl": {"FI_PROVIDER": "efa"}})


def test_a_run_file_without_a_cluster_is_as_before(content: dict[str, Any]) -> None:
    old = {key: value for key, value in content.items() if key not in ("cluster", "roles")}
    run = parse(old, where="x")
    assert (run.rollout.replicas, run.learner.trainer.ranks, list(run.environment())) == (1, 1, [RUN_VARIABLE])


@pytest.mark.parametrize(
    ("backend", "overrides", "words"),
    [
        ("slurm", {}, "--backend slurm: not there yet; use local on one machine, ray on several (start Ray inside the allocation"),
        ("kubernetes", {}, "--backend kubernetes: not there yet; use local on one machine, ray on several (KubeRay"),
        ("local", {"cluster.node_groups": [{"name": "here", "count": 2, "gpus_per_node": 4}]}, "--backend local: cluster.node_groups has 2 machines"),
        ("ray", {"roles.actor.parallelism": {}, "roles.rollout": {"gpu_group": "train"}, "cluster.gpu_groups": {"train": {"nodes": "here", "gpus_per_node": 8, "shared": True}}, "rollout.gpu_memory_fraction": 0.4}, "cluster.gpu_groups.train is shared, and Ray gives a GPU to one process"),
    ],
)  # fmt: skip
def test_a_backend_refuses_what_it_cannot_do(content: dict[str, Any], backend: str, overrides: dict[str, Any], words: str) -> None:
    if backend == "local":
        content["cluster"]["gpu_groups"] = {"train": {"nodes": "here", "num_nodes": 1, "gpus_per_node": 4}, "sample": {"nodes": "here", "num_nodes": 1, "gpus_per_node": 4}}
    run = parse(content, where="x", overrides=overrides)
    with pytest.raises(Mistakes, match="^--backend") as caught:
        check(run, backend)
    assert words in str(caught.value)


def test_a_critic_is_cut_as_the_actor() -> None:
    nodes = {"node_groups": [{"name": "x", "gpus_per_node": 4}], "gpu_groups": {"g": {"nodes": "x", "gpus_per_node": 4}}}
    roles = Roles.model_validate({"actor": {"gpu_group": "g"}, "critic": {"gpu_group": "g"}, "rollout": {"node_group": "x"}})
    cuts = cuts_of(ClusterConfig.model_validate(nodes), roles)
    assert cuts["critic"] == cuts["actor"] and cuts["actor"]["shard"] == 4
