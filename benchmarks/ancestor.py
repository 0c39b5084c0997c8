"""Build the environment of ml4xcube 1.1.0 and xbatcher, with which benchmarks compare.

``python benchmarks/ancestor.py FOLDER``. The ancestor's own requirements hold zarr back to
version 2, so it comes without them, on the zarr that ml4cube reads with.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path


def main(folder: Path) -> None:
    """Create `folder` if it is missing and install."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet"]
    needed = ["zarr==3.1.6", "numpy", "xarray", "dask[array]", "pandas", "scikit-learn", "scipy"]
    subprocess.run([*install, *needed, "xbatcher", "psutil", "bokeh"], check=True)
    alone = ["ml4xcube==1.1.0", "rechunker", "mypy_extensions", "tqdm", "matplotlib"]
    subprocess.run([*install, "--no-deps", *alone], check=True)
    (folder / ".ready").touch()
    print(f"ready: {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
