"""Build or refresh the project's virtual environment: `python3 scripts/setup_env.py .venv`.

With `--without-torch`, only what the tests that need no torch need. torch is installed first and
alone, and pinned for every later step, so that nothing replaces it. On a machine without a GPU, a
CUDA build is refused unless `ALLOW_CUDA=1`. Standard library only, since nothing is installed yet.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TORCH = os.environ.get("TORCH", "torch==2.13.0")
ROOT = Path(__file__).resolve().parent.parent
CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA driver."""
    smi = shutil.which("nvidia-smi")
    return bool(smi) and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


def installed_torch(python: Path) -> str | None:
    """Return the version of torch in the environment, if any."""
    code = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return found.stdout.strip() or None if found.returncode == 0 else None


def refuse_unasked_cuda(python: Path) -> None:
    """Stop if the configured index would install CUDA on a machine without a GPU."""
    if has_gpu() or os.environ.get("ALLOW_CUDA") == "1":
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        install(python, "--dry-run", "--report", str(report), TORCH)
        names = [
            item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]
        ]
    cuda = [name for name in names if name.startswith(CUDA_PREFIXES)]
    if cuda:
        sys.exit(
            f"{TORCH} would install {len(cuda)} CUDA packages ({', '.join(cuda[:3])}, ...), but "
            "this machine has no GPU.\nUse the CPU index that PyTorch names under 'Get started':\n"
            "    make setup PIP_EXTRA_INDEX_URL=<that index>\n"
            "or install a torch of your choice into the environment first, or allow CUDA:\n"
            "    make setup ALLOW_CUDA=1"
        )


def install(python: Path, *args: str) -> None:
    """Run `pip install` in the environment; stop with its own message if it fails."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # Python compiles what it imports. pip would compile every file, which takes half a minute.
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", *args]
    if subprocess.run(command, env=environment).returncode != 0:
        sys.exit(f"pip install {' '.join(args)} failed, see its message above")


def install_with_torch(folder: Path, *packages: str) -> None:
    """Install torch into an environment that has none, then packages that keep this torch."""
    python, constraints = python_in(folder), folder / "constraints.txt"
    if installed_torch(python) is None:
        print(f"installing {TORCH} alone, before anything can ask for another", flush=True)
        refuse_unasked_cuda(python)
        install(python, TORCH)
    constraints.write_text(f"torch=={installed_torch(python)}\n")
    print("installing ml4cube and its tools", flush=True)
    install(python, "--constraint", str(constraints), *packages)


def python_in(folder: Path) -> Path:
    """Return the Python of an environment, which is created if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"creating {folder}", flush=True)
        venv.create(folder, with_pip=True)
    return python


def main(folder: Path, with_torch: bool = True) -> None:
    """Bring the packages in `folder` in step with pyproject.toml."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the very check that tells the user
        sys.exit(
            f"ml4cube needs Python 3.11 or newer, this is {sys.version.split()[0]}: set PYTHON="
        )
    if with_torch:
        install_with_torch(folder, "--editable", f"{ROOT}[dev]")
    else:
        print("installing ml4cube and what its tests without torch need", flush=True)
        install(python_in(folder), "--editable", f"{ROOT}[test-core]")
    (folder / ".ready").touch()
    print(f"ready: {folder}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_torch="--without-torch" not in sys.argv)
