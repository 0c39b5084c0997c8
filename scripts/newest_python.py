"""Print the newest Python that ml4cube supports and this machine has.

Exit with 1 if none is newer than the one that runs this. Standard library only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NEWEST, OLDEST = 13, 11  # the support window, as in pyproject.toml


def candidates(minor: int) -> Iterator[str]:
    """Yield where Python 3.`minor` may be: on the PATH, or among pyenv's versions."""
    if found := shutil.which(f"python3.{minor}"):
        yield found
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True).stdout.strip()
        yield from map(str, sorted(Path(root).glob(f"versions/3.{minor}.*/bin/python")))


def works(python: str) -> bool:
    """Return True if this interpreter starts and can build environments."""
    return subprocess.run([python, "-c", "import venv, ssl"], capture_output=True).returncode == 0


def main() -> None:
    """Print the first that works, newest first."""
    for minor in range(NEWEST, OLDEST - 1, -1):
        for python in filter(works, candidates(minor)):
            print(python)
            sys.exit(minor <= sys.version_info.minor)
    sys.exit("found no Python 3.11 to 3.13")


if __name__ == "__main__":
    main()
