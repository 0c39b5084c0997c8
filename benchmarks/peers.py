"""Build an environment with the libraries that a benchmark compares with, and ml4cube itself.

``python benchmarks/peers.py FOLDER PACKAGE...``: torch comes first and alone, as in
`scripts/setup_env.py`, and nothing that is installed after it may replace it.
"""

from __future__ import annotations

import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from setup_env import TORCH, installed_torch, pip, refuse_unasked_cuda  # noqa: E402


def main(folder: Path, packages: list[str]) -> None:
    """Create `folder` if it is missing and install the packages there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if installed_torch(python) is None:
        refuse_unasked_cuda(python)
        pip(python, "install", "--quiet", TORCH)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={installed_torch(python)}\n")
    pinned = ["install", "--quiet", "--constraint", str(constraints)]
    pip(python, *pinned, "--editable", f"{ROOT}[torch]", *packages)
    (folder / ".ready").touch()
    print(f"ready: {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
