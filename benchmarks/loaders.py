"""Build the environment of the loaders that `loading.py` compares with, beside ml4cube itself.

``python benchmarks/loaders.py FOLDER``. ml4xcube comes without its own requirements, which would
hold zarr back to version 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

from peers import main
from setup_env import install

PEERS = ["litdata", "mosaicml-streaming", "webdataset", "xbatcher", "zarr==3.1.6"]
ALONE = ["ml4xcube==1.1.0", "rechunker", "mypy_extensions"]
NEEDED = ["pandas", "scikit-learn", "scipy", "tqdm", "matplotlib", "bokeh"]

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    main(folder, [*PEERS, *NEEDED])
    install(folder / "bin" / "python", "--no-deps", *ALONE)
    (folder / ".ready").touch()
