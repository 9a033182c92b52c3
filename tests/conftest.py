"""Fixtures that every part's tests share. The environment is set before any test module imports torch or vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else vLLM compiles its sampler with g++, which need not be installed
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less: the worker lives in the engine's
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",  # a test that reaches for the hub is a bug
    "TOKENIZERS_PARALLELISM": "false",
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch's store asks for the name of each peer: without an answer that takes glibc's 5 s, and the store stands still
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models are slower on more threads, and replicas share the cores


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random two-layer Llama: hidden 64, two heads of 32 on one key-value head, tied, 259 byte-level tokens."""
    from deploy.models import tiny

    return tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted once into models/ (slow tests only)."""
    from deploy.models import smollm2

    return smollm2(ROOT / "models" / "smollm2")
