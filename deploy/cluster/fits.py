"""Whether what runs on each GPU fits into its memory, by the estimates of memory.py. Pure but for reading models' config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.cluster.config import ClusterConfig, RoleName, Roles
from deploy.cluster.devices import users_of
from deploy.cluster.dimensions import cuts_of
from deploy.cluster.memory import GIB, GPU_GIB, OVERHEAD_GIB, Term, served, total, trained, words_of
from deploy.cluster.shape import BYTES, Shape, shape_of
from deploy.planning import PEAK, Job

if TYPE_CHECKING:
    from deploy.schema import RunFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one role takes of each GPU of its group. Example: `Need(role="rollout", terms=terms, tokens=41_000.0)`"""

    role: RoleName
    terms: list[Term]
    tokens: float | None = None  # of a replica: what its KV cache has room for

    @property
    def gib(self) -> float:
        """All of it."""
        return total(self.terms)


def gpu_gib(cluster: ClusterConfig, group: str) -> float:
    """Memory of one GPU of a group; 0: the file does not say which GPU it is."""
    nodes = cluster.node_group(cluster.gpu_groups[group].nodes)
    return 0.0 if nodes is None else nodes.gpu_memory_gib or GPU_GIB[nodes.gpu]


def needs_of(run: RunFile) -> dict[str, list[Need]]:
    """By GPU group, of the roles whose model's size is known."""
    cluster, roles = run.cluster, run.roles
    if cluster is None or roles is None:
        return {}
    found: dict[str, list[Need]] = {}
    for group, users in users_of(roles).items():
        needs = [need for role in users if (need := _need(run, cluster, roles, role, group)) is not None]
        if needs:
            found[group] = needs
    return found


def unknown_sizes(run: RunFile) -> list[str]:
    """Models on GPUs of which nothing is known, so that their memory is not estimated."""
    names = [run.model] if run.cluster is not None and run.cluster.gpu_groups else []
    return [name for name in names if _shape(run, name) is None]


def memory_mistakes(run: RunFile) -> Iterator[str]:
    """GPUs that hold too little, with the arithmetic."""
    assert run.cluster is not None
    for group, needs in needs_of(run).items():
        there = gpu_gib(run.cluster, group)
        if not there:
            continue
        wanted = sum(need.gib for need in needs)
        if wanted > there:
            arithmetic = "; ".join(f"{need.role}: {words_of(need.terms)}" for need in needs)
            yield f"cluster.gpu_groups.{group}: a GPU would have to hold about {wanted:.0f} GiB and has {there:g}: {arithmetic}; {_way_out(needs)}"
        for need in needs:
            if need.tokens is not None and need.tokens < run.rollout.max_model_len:
                yield (
                    f"rollout.gpu_memory_fraction={run.rollout.gpu_memory_fraction:g}: the KV cache would have room for {max(0.0, need.tokens):,.0f} tokens, less than one sample of rollout.max_model_len={run.rollout.max_model_len}: "
                    f"{words_of(need.terms)}; raise it, cut the model by more GPUs (roles.rollout.parallelism.tensor), or use shorter samples"
                )


def _way_out(needs: list[Need]) -> str:
    trained_there = any(need.role == "actor" for need in needs)
    ways = ["give the role more GPUs"]
    if trained_there:
        ways += ["shorter rows (learner.trainer.row_tokens)", "learner.trainer.recompute: full", "learner.trainer.offload: true"]
    if any(need.role == "rollout" for need in needs):
        ways.append("a smaller rollout.gpu_memory_fraction")
    return ", ".join(ways[:-1]) + (" or " if ways[:-1] else "") + ways[-1]


def _need(run: RunFile, cluster: ClusterConfig, roles: Roles, role: RoleName, group: str) -> Need | None:
    shape = _shape(run, run.model)
    if role == "rollout":
        if shape is None or not gpu_gib(cluster, group):
            return None
        terms, tokens = served(run.rollout, shape, gpu_gib(cluster, group))
        return Need(role=role, terms=terms, tokens=tokens)
    if role == "actor":
        critic = run.learner.critic_in_use
        of_critic = _shape(run, critic.model or run.model) if critic is not None else None
        return None if shape is None else Need(role=role, terms=trained(run.learner, shape, of_critic, cuts_of(cluster, roles)["actor"]["shard"]))
    return _judges(run) if role == "reward_model" else None  # critic and reference are counted with the actor


def job_of(run: RunFile, where: str, *, length_share: float, mfu: float) -> Job:
    """What `headrace plan` estimates. Raises ValueError where the file does not say enough."""
    cluster, roles, shape = run.cluster, run.roles, _shape(run, run.model)
    if cluster is None or roles is None or roles.actor.gpu_group is None or roles.rollout.gpu_group is None:
        raise ValueError(f"{where}: cluster: actor and rollout need GPU groups, or nothing can be planned; add cluster and roles (deploy/templates/stage-1-one-machine.yaml)")
    if shape is None:
        raise ValueError(f"{where}: model_sizes: nothing is known of {run.model}, which is no folder here; add its sizes, for instance {{parameters_b: 4.02, layers: 36, hidden: 2560, heads: 32, kv_heads: 8, head_width: 128, vocab: 151936}}")
    nodes = cluster.node_group(cluster.gpu_groups[roles.actor.gpu_group].nodes)
    assert nodes is not None, "the layout was checked"
    if nodes.gpu == "other":
        raise ValueError(f"{where}: cluster.node_groups.{nodes.name}.gpu=other: its speed is not known; name one of {', '.join(PEAK)}")
    critic = run.learner.critic_in_use
    return Job(
        learner=run.learner, rollout=run.rollout, shape=shape, critic=_shape(run, critic.model or run.model) if critic else None,
        gpu=nodes.gpu, gpu_gib=nodes.gpu_memory_gib or GPU_GIB[nodes.gpu], length_share=length_share, mfu=mfu,
    )  # fmt: skip


def _judges(run: RunFile) -> Need | None:
    """Of a reward server's GPU: every model that its scorers load."""
    models = [str(scorer.args["model"]) for scorer in (run.reward.scorers if run.reward else ()) if scorer.use in ("reward_model", "generative_reward") and "model" in scorer.args]
    shapes = [(name, shape) for name in models if (shape := _shape(run, name)) is not None]
    if not shapes:
        return None
    terms = [Term(name="weights", gib=BYTES["bfloat16"] * shape.parameters / GIB, words=f"2 B x {shape.parameters / 1e9:.2f} B of {name}") for name, shape in shapes]
    return Need(role="reward_model", terms=[*terms, Term(name="CUDA and activations", gib=OVERHEAD_GIB, words="by experience")])


def _shape(run: RunFile, model: str) -> Shape | None:
    sizes = run.model_sizes.get(model)
    return shape_of(model, sizes.model_dump() if sizes else None)
