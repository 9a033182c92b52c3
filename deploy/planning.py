"""How fast a run could be, and how its GPUs are best divided: an estimate from first principles, with its arithmetic. Pure.

Training is bound by arithmetic: 6 operations a weight and token (forward and backward), 2 more where a frozen model judges each token, 2 more where
activations are computed again (Kaplan et al. 2020, Scaling Laws, section 2.1), at a share of the peak (MFU). Sampling is bound by memory: each decoding
step reads the weights once, and the keys and values of every running sample. The two sides overlap, so a step takes as long as the slower one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.cluster.memory import GIB, OVERHEAD_GIB, total, trained
from deploy.cluster.shape import BYTES, Shape
from learner.config import LearnerConfig
from rollout_server.config import RolloutConfig

# Dense bfloat16 operations and bytes of memory a second, as NVIDIA states them.
PEAK = {"a100-40": (312e12, 1.555e12), "a100-80": (312e12, 2.039e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "b200": (2250e12, 8.0e12), "l40s": (362e12, 0.864e12)}
MFU = 0.4  # of the learner's rows; docs/benchmarks.md has what was measured
BANDWIDTH_SHARE = 0.6  # of the stated, that a decoding engine reaches
LENGTH_SHARE = 0.5  # of max_new_tokens, that a sample has on average: the run file does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One division of the GPUs. Example: `Split(ranks=4, replicas=4, train_s=21.0, sample_s=18.0)`"""

    ranks: int
    replicas: int
    train_s: float  # a step
    sample_s: float

    @property
    def step_s(self) -> float:
        """Both sides overlap."""
        return max(self.train_s, self.sample_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is planned. Example: see `headrace plan`."""

    learner: LearnerConfig
    rollout: RolloutConfig
    shape: Shape
    critic: Shape | None
    gpu: str
    gpu_gib: float
    length_share: float = LENGTH_SHARE  # of max_new_tokens
    mfu: float = MFU

    @property
    def samples(self) -> int:
        """A step's."""
        return self.learner.groups_per_step * self.learner.sampling.group_size

    @property
    def new_tokens(self) -> float:
        """A sample's, on average."""
        return self.learner.sampling.max_new_tokens * self.length_share

    @property
    def prompt_tokens(self) -> float:
        """Half of what is admitted, on average."""
        longest = [one.max_prompt_tokens for one in self.learner.data.sources.values() if one.max_prompt_tokens]
        return max(longest, default=512) / 2


def train_s(job: Job, ranks: int) -> float:
    """Seconds of one step's training."""
    algorithm, trainer = job.learner.algorithm, job.learner.trainer
    prompts = job.prompt_tokens / (job.learner.sampling.group_size if trainer.share_prefix else 1)
    tokens = job.samples * (job.new_tokens + prompts) * job.learner.optimizer.epochs
    frozen = (algorithm.kl is not None and algorithm.kl.reference != "behaviour") + (algorithm.teacher is not None)
    a_token = (6 + 2 * (trainer.recompute != "none") + 2 * frozen) * job.shape.parameters + (8 * job.critic.parameters if job.critic else 0)
    return tokens * a_token / (ranks * PEAK[job.gpu][0] * job.mfu)


def running_samples(job: Job) -> float:
    """Samples that one engine draws at once: max_num_seqs, or what its KV cache has room for."""
    width, parts = BYTES[job.rollout.dtype], _gpus_of_engine(job)
    cache = parts * (job.rollout.gpu_memory_fraction * job.gpu_gib - OVERHEAD_GIB) * GIB - width * job.shape.parameters
    room = max(0.0, cache) / (job.shape.kv_bytes_per_token(job.rollout.dtype) * (job.prompt_tokens + job.new_tokens))
    return min(float(job.rollout.max_num_seqs), room)


def sample_s(job: Job, replicas: int) -> float:
    """Seconds of one step's sampling: decoding steps, each of which reads weights and the cache of all running samples.

    An engine of several pipeline stages is taken to keep all of them busy.
    """
    num_engines = replicas * job.rollout.engines
    running = min(running_samples(job), job.samples / num_engines)
    if running < 1:
        return float("inf")
    width, parts = BYTES[job.rollout.dtype], _gpus_of_engine(job)
    context = job.prompt_tokens + job.new_tokens / 2
    read = width * job.shape.parameters + running * context * job.shape.kv_bytes_per_token(job.rollout.dtype)
    step_s = read / (parts * PEAK[job.gpu][1] * BANDWIDTH_SHARE)
    tokens_per_s = num_engines * running / step_s
    return job.samples * job.new_tokens / tokens_per_s


def _gpus_of_engine(job: Job) -> int:
    return job.rollout.tensor_parallel * job.rollout.pipeline_parallel


def fits(job: Job, ranks: int) -> bool:
    """Whether training fits into the memory of so many GPUs."""
    return total(trained(job.learner, job.shape, job.critic, ranks)) <= job.gpu_gib


def splits(job: Job, num_gpus: int) -> list[Split]:
    """Every division of so many GPUs that fits, the fastest first."""
    each = job.rollout.num_workers
    found = [
        Split(ranks=ranks, replicas=(num_gpus - ranks) // each, train_s=train_s(job, ranks), sample_s=sample_s(job, (num_gpus - ranks) // each))
        for ranks in range(1, num_gpus)
        if num_gpus - ranks >= each and fits(job, ranks)
    ]
    return sorted(found, key=lambda split: (split.step_s, split.ranks))


def lines(job: Job, ranks: int, replicas: int) -> Iterator[str]:
    """The prediction for the file as it is, the best division, and what both rest on."""
    each = job.rollout.num_workers
    now = Split(ranks=ranks, replicas=replicas, train_s=train_s(job, ranks), sample_s=sample_s(job, replicas))
    yield f"an estimate from first principles, not a measurement: MFU {job.mfu:g}, {BANDWIDTH_SHARE:g} of the memory's bandwidth, samples of {job.length_share:g} x max_new_tokens; rewards, pushes and saves cost nothing"
    yield f"a step: {job.samples} samples of {job.prompt_tokens:.0f} + {job.new_tokens:.0f} tokens"
    yield f"training: {now.train_s:.1f} s on {ranks} GPUs; sampling: {now.sample_s:.1f} s on {replicas} replicas of {each} GPUs, {min(running_samples(job), job.samples / (replicas * job.rollout.engines)):.0f} samples at once in each{' of their engines' if job.rollout.engines > 1 else ''}"
    slower = "training" if now.train_s > now.sample_s else "sampling"
    yield f"as the file says: {now.step_s:.1f} s a step, bound by {slower}; {job.samples * job.new_tokens / now.step_s:,.0f} trained tokens a second; the other side idles {1 - min(now.train_s, now.sample_s) / now.step_s:.0%}"
    found = splits(job, ranks + replicas * each)
    if not found:
        yield f"no division of {ranks + replicas * each} {job.gpu} GPUs holds the training: more GPUs, trainer.recompute or trainer.offload"
        return
    best = found[0]
    gain = f"{now.step_s / best.step_s:.2f} times as fast" if best.step_s < 0.99 * now.step_s else "no faster than the file's own"
    yield f"best division of these GPUs: {best.ranks} train, {best.replicas} replicas of {each}: training {best.train_s:.1f} s, sampling {best.sample_s:.1f} s, {best.step_s:.1f} s a step, {gain}"

