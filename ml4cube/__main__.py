"""The command line: ``python -m ml4cube``, the same as ``ml4cube``."""

import os
import sys

# `python -m` searches the working directory first, and would take a pandas.py there for pandas.
if sys.path[:1] == [os.getcwd()] and not sys.flags.safe_path:
    del sys.path[0]

from ml4cube.cli.main import main

if __name__ == "__main__":
    main()
