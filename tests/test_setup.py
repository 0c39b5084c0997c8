"""Setting up: no CUDA unasked on a machine without a GPU, no torch replaced."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup_env.py"


@pytest.fixture
def setup_env(monkeypatch):
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("ALLOW_CUDA", raising=False)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


def offer(monkeypatch, module, *names):
    """Let pip answer that it would install these packages; return the calls it gets."""
    calls = []

    def install(python, *arguments):
        calls.append(arguments)
        if "--report" in arguments:
            items = [{"metadata": {"name": name}} for name in names]
            report = Path(arguments[arguments.index("--report") + 1])
            report.write_text(json.dumps({"install": items}))

    monkeypatch.setattr(module, "install", install)
    return calls


def test_cuda_is_refused_before_anything_is_downloaded(setup_env, monkeypatch, tmp_path):
    calls = offer(monkeypatch, setup_env, "torch", "nvidia-cudnn-cu13", "triton")
    with pytest.raises(SystemExit, match="2 CUDA packages") as caught:
        setup_env.refuse_unasked_cuda(tmp_path)
    assert "ALLOW_CUDA=1" in str(caught.value)
    assert all("--dry-run" in call for call in calls)


@pytest.mark.parametrize("asked", [False, True])
def test_a_cpu_build_passes_and_cuda_may_be_asked_for(setup_env, monkeypatch, tmp_path, asked):
    offer(monkeypatch, setup_env, "torch", "sympy", *(["nvidia-nccl-cu13"] if asked else []))
    if asked:
        monkeypatch.setenv("ALLOW_CUDA", "1")
    setup_env.refuse_unasked_cuda(tmp_path)


def test_a_torch_that_is_there_is_pinned_and_not_installed_again(setup_env, monkeypatch, tmp_path):
    calls = offer(monkeypatch, setup_env)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    monkeypatch.setattr(setup_env, "installed_torch", lambda python: "2.7.1+rocm6.3")
    setup_env.main(tmp_path)
    assert (tmp_path / "constraints.txt").read_text() == "torch==2.7.1+rocm6.3\n"
    assert len(calls) == 1
    assert "--constraint" in calls[0]
    assert not any(argument.startswith("torch") for argument in calls[0])
