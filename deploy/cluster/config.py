"""The sections `cluster` and `roles` of a run file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from learner.section import Count, Section

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=40)]
RoleName = Literal["actor", "critic", "reference", "reward_model", "rollout"]
TRAINED: tuple[RoleName, ...] = ("actor", "critic", "reference")  # run in the learner's ranks
DIMENSIONS = ("data", "shard", "replicate", "tensor", "pipeline", "engines", "context")


class NodeGroup(Section):
    """Machines that are alike."""

    name: Name
    count: Count = Field(1, description="machines")
    gpus_per_node: int = Field(ge=0, description="0: machines without GPUs")
    role: Literal["any", "trainer", "rollout", "reward"] = Field("any", description="what may run there: the learner's ranks, replicas, reward servers, or all of them")
    gpu: Literal["a100-40", "a100-80", "h100", "h200", "b200", "l40s", "other"] = Field("h100", description="for the estimates of memory and speed")
    gpu_memory_gib: float | None = Field(None, gt=0, description="of one GPU; None: as `gpu` has")


class GpuGroup(Section):
    """A named set of GPUs that a role runs on: the next free ones of so many machines of a node group, in the order in which groups are written."""

    nodes: Name = Field(description="name of a node group")
    num_nodes: Count | None = Field(None, description="machines; None: all of the node group")
    gpus_per_node: Count
    shared: bool = Field(False, description="several roles use the same GPUs; actor, critic and reference live in the same ranks and need not say so")


class Communication(Section):
    """How GPUs talk; becomes the environment of every process."""

    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="of weight pushes, where push.transport says auto")
    rdma_enabled: bool | None = Field(None, description="false: NCCL goes over TCP (NCCL_IB_DISABLE=1); true: over InfiniBand or RoCE, which `headrace doctor` looks for; None: NCCL decides")
    interface: str = Field("", description="network interface of sockets, eth0; empty: NCCL and gloo decide")
    nccl: dict[str, str] = Field({}, description="further NCCL_ variables")

    @field_validator("nccl", mode="before")
    @classmethod
    def _as_text(cls, given: object) -> object:
        """YAML gives numbers."""
        return {key: str(value) for key, value in given.items()} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _names(self) -> Communication:
        for name in self.nccl:
            if not name.startswith("NCCL_"):
                raise ValueError(f"communication.nccl.{name}: not a variable of NCCL; their names begin with NCCL_, others belong into the environment")
        said = {"NCCL_IB_DISABLE": self.rdma_enabled is not None and "rdma_enabled", "NCCL_SOCKET_IFNAME": bool(self.interface) and "interface"}
        for name, key in said.items():
            if key and name in self.nccl:
                raise ValueError(f"communication.nccl.{name}={self.nccl[name]} and communication.{key}: both say the same thing; keep one")
        return self

    def environment(self) -> dict[str, str]:
        """Variables of every process."""
        rdma = {} if self.rdma_enabled is None else {"NCCL_IB_DISABLE": "0" if self.rdma_enabled else "1"}
        interface = {"NCCL_SOCKET_IFNAME": self.interface, "GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        return {**rdma, **interface, **self.nccl}


class Logging(Section):
    """What services write."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    save_dir: str = Field("", description="folder of the services' logs; empty: run_dir/logs, where those of gateway and ranks always are")


class RayCluster(Section):
    """Which Ray cluster `--backend ray` uses."""

    address: str = Field("", description='host:port of a cluster that is there, or "auto"; empty: one is started on this machine and ends with the run')
    local_nodes: Count = Field(1, description="raylets of a cluster that is started here: more than one is for trying out")
    ssh: str = Field("", description="for --dry-run alone: host pattern that its `ray start` lines name, gpu-{index}")


class ClusterConfig(Section):
    """Machines and how they talk."""

    node_groups: tuple[NodeGroup, ...] = Field(min_length=1)
    gpu_groups: dict[Name, GpuGroup] = Field({}, description="by name, in the order in which they take GPUs")
    communication: Communication = Communication()
    logging: Logging = Logging()
    ray: RayCluster = RayCluster()

    @model_validator(mode="after")
    def _names_differ(self) -> ClusterConfig:
        names = [group.name for group in self.node_groups]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"cluster.node_groups: {twice[0]} is the name of two groups; give each its own")
        return self

    def node_group(self, name: str) -> NodeGroup | None:
        """The group of this name; None: there is none."""
        return next((group for group in self.node_groups if group.name == name), None)

    @property
    def num_nodes(self) -> int:
        """Machines of all groups."""
        return sum(group.count for group in self.node_groups)


class Parallelism(Section):
    """How a role is cut over its GPUs; the product of all is their number. None: what the others leave."""

    data: Count | None = Field(None, description="independent copies: rollout replicas, reward servers")
    shard: Count | None = Field(None, description="FSDP ranks of a trained role")
    replicate: Count = Field(1, description="copies of the sharded model (HSDP)")
    tensor: Count = Field(1, description="GPUs that share each layer of an engine")
    pipeline: Count = Field(1, description="parts of the layers of an engine, one after the other, each on `tensor` GPUs")
    engines: Count = Field(1, description="engines of one replica behind one address, each on its own tensor x pipeline GPUs")
    context: Count = 1


class RoleConfig(Section):
    """Where one role runs, and how it is cut."""

    gpu_group: Name | None = Field(None, description="None: on CPUs")
    node_group: Name | None = Field(None, description="machines of a role without GPUs; None: any")
    num_nodes: Count = Field(1, description="machines of a role without GPUs; more than one for actor alone")
    parallelism: Parallelism = Parallelism()

    @model_validator(mode="after")
    def _one_place(self) -> RoleConfig:
        if self.gpu_group is not None and self.node_group is not None:
            raise ValueError(f"gpu_group={self.gpu_group} with node_group={self.node_group}: a GPU group says its machines; remove node_group")
        if self.gpu_group is not None and self.num_nodes > 1:
            raise ValueError(f"num_nodes={self.num_nodes} with gpu_group={self.gpu_group}: a GPU group says its machines; remove num_nodes")
        return self


class Roles(Section):
    """Who runs where. critic and reference live in the actor's ranks: where they are named, they name its group."""

    actor: RoleConfig
    rollout: RoleConfig
    critic: RoleConfig | None = None
    reference: RoleConfig | None = None
    reward_model: RoleConfig | None = Field(None, description="the reward servers; None: on CPUs of any machine")

    def named(self) -> dict[RoleName, RoleConfig]:
        """Those that the file has."""
        every: dict[RoleName, RoleConfig | None] = {"actor": self.actor, "critic": self.critic, "reference": self.reference, "rollout": self.rollout, "reward_model": self.reward_model}
        return {name: role for name, role in every.items() if role is not None}


class Scale(Section):
    """Replicas follow the load, between two bounds (docs/scaling.md)."""

    least: Count = Field(1, description="replicas that always run")
    most: Count = Field(description="replicas that may run")
    learner_idle: float = Field(0.3, gt=0, lt=1, description="the learner idles for this share of its steps, while replicas do not and no batch lies ready: one more")
    replicas_idle: float = Field(0.5, gt=0, lt=1, description="replicas idle for this share, while the learner does not: one less")
    steps: Count = Field(3, description="steps in a row that say the same, before anything is done")

    @model_validator(mode="after")
    def _order(self) -> Scale:
        if self.least >= self.most:
            raise ValueError(f"scale.least={self.least} is not under most={self.most}: nothing could change; use a lower one, or leave scale out")
        return self
