"""Print hashes of results that a refactoring must not change.

    python scripts/hash_results.py > before.txt    # and again after the change; then diff the two

What is hashed is in `benchmarks/cases.py`, small: stores file by file, statistics, labels, batches,
losses and weights, predictions, scores, insights and filled gaps. The metadata of a store is left
out of its hash, since it names versions and times. All is computed with one thread (this script
sets OMP_NUM_THREADS=1): with more, last bits of torch's layers and of estimators differ.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read by numpy's BLAS and by torch when they are imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import CASES, Workplace


def main() -> None:
    """Print a name and a hash for each result."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        work = Workplace(Path(folder))
        for run in CASES.values():
            for name, pieces in run(work).items():
                digest = hashlib.sha256(b"".join(pieces)).hexdigest()
                print(f"{name:40} {digest[:24]}", flush=True)


if __name__ == "__main__":
    main()
