"""Run code blocks as a user would: one script file, in a folder of its own, unguarded."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


# One after the other, each in its own folder as the main program.
SCRIPTS = """
import os, runpy, sys
for folder in sys.argv[1:]:
    os.chdir(folder)
    print("running", folder, flush=True)
    runpy.run_path("script.py", run_name="__main__")
"""


def run_script(folder: Path, text: str, *, ranks: int = 0, timeout_s: int = 240) -> str:
    """Write `text` to a script in `folder` and run it; with `ranks`, under torchrun.

    Returns what it wrote to stdout and stderr; fails the test if it exits non-zero.
    """
    script = folder / "script.py"
    script.write_text(text)
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return _run(folder, [*launcher, script.name], timeout_s)


def run_scripts(folder: Path, texts: Mapping[str, str], timeout_s: int = 280) -> str:
    """Run several scripts in one process, each in a folder of its name."""
    places = [folder / name for name in texts]
    for place, text in zip(places, texts.values(), strict=True):
        place.mkdir(exist_ok=True)
        (place / "script.py").write_text(text)
    return _run(folder, ["-c", SCRIPTS, *map(str, places)], timeout_s)


def _run(folder: Path, arguments: Sequence[str], timeout_s: int) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
