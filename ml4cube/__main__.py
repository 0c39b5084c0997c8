"""The command line: ``python -m ml4cube``, the same as ``ml4cube``."""

from ml4cube.cli.main import main

if __name__ == "__main__":
    main()
