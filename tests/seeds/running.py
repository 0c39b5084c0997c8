"""Run code blocks as a user would: one script file, in a folder of its own, unguarded."""

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


def run_script(folder: Path, text: str, *, ranks: int = 0, timeout_s: int = 240) -> str:
    """Write `text` to a script in `folder` and run it; with `ranks`, under torchrun.

    Returns what it wrote to stdout and stderr; fails the test if it exits non-zero.
    """
    script = folder / "script.py"
    script.write_text(text)
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, script.name],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
