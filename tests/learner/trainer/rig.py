"""Small models, samples and process groups for the trainer's tests."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from learner.trainer.model import Policy, load_policy
from learner.trainer.samples import Sample
from learner.trainer.table import Entry

VOCABULARY = 61
TEMPERATURE = 0.7


def gpt2(folder: Path, *, dropout: float = 0.5) -> Path:
    """Two layers, tied head, dropout: the one architecture here that computes in float64 throughout."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=64, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, initializer_range=0.2)
    return saved(config, folder)


def llama(folder: Path, *, tied: bool = True) -> Path:
    """Three layers, grouped keys, widths that two ranks cannot halve."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=36, intermediate_size=51, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.2, bos_token_id=1, eos_token_id=2, rope_theta=10000.0,
    )  # fmt: skip
    return saved(config, folder)


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def samples(num_groups: int, group_size: int, *, seed: int = 1) -> list[Sample]:
    """Groups with prompts of 2 to 8 and completions of 1 to 6 tokens, every third token of some masked."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    made = []
    for group in range(num_groups):
        prompt = torch.randint(0, VOCABULARY, (number(2, 9),), generator=generator)
        for index in range(group_size):
            length = number(1, 7)
            mask = torch.ones(length, dtype=torch.bool)
            mask[2::3] = index % 2 == 0
            made.append(
                Sample(
                    group_id=f"g{group}", sample_index=index, prompt_ids=prompt, completion_ids=torch.randint(0, VOCABULARY, (length,), generator=generator),
                    behaviour=-3.5 + torch.rand(length, generator=generator), loss_mask=mask,
                )
            )  # fmt: skip
    return made


def entries(made: list[Sample], owner: Callable[[Sample], int] = lambda _: 0) -> list[Entry]:
    """The table of these samples: rewards 1, 0, 0, ... of each group."""
    return [
        Entry(
            group_id=s.group_id, sample_index=s.sample_index, reward=float(s.sample_index == 0), usable=True, num_prompt_tokens=s.prompt_ids.numel(),
            num_completion_tokens=s.completion_ids.numel(), num_trained_tokens=s.num_trained_tokens, staleness=0, owner=owner(s), truncated=False, num_versions=1,
        )
        for s in made
    ]  # fmt: skip


def reference_logprobs(folder: Path, sample: Sample, dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' own unpacked forward: log softmax(logits / T) of each completion token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()  # sdpa leaves a cap of the scores out
    ids = torch.cat([sample.prompt_ids, sample.completion_ids])
    logits = model(ids[None]).logits[0, sample.prompt_ids.numel() - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, sample.completion_ids[:, None])[:, 0].detach()


def policy(folder: Path, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> Policy:
    return load_policy(folder, mesh=mesh, compute_dtype=dtype, temperature=TEMPERATURE, master_dtype=dtype)


@contextmanager
def group(rank: int, size: int, store: Path) -> Iterator[DeviceMesh]:
    """A gloo world met at a file, as a mesh."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def spawn(size: int, work: Callable[..., None], store: Path, *arguments: Any) -> None:
    """work(mesh, *arguments) on `size` real processes; raises the first failure of any."""
    mp.spawn(_enter, args=(size, store, work, arguments), nprocs=size)


def _enter(rank: int, size: int, store: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with group(rank, size, store) as mesh:
        work(mesh, *arguments)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
