"""Build an environment with the libraries that a benchmark compares with, and ml4cube itself.

``python benchmarks/peers.py FOLDER PACKAGE...``: torch comes first and alone, as in
`scripts/setup_env.py`, and nothing that is installed after it may replace it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from setup_env import install_with_torch  # noqa: E402


def main(folder: Path, packages: list[str]) -> None:
    """Create `folder` if it is missing and install the packages there."""
    install_with_torch(folder, "--editable", f"{ROOT}[torch]", *packages)
    (folder / ".ready").touch()
    print(f"ready: {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
