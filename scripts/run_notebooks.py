"""Run notebooks whole and keep their outputs: `python scripts/run_notebooks.py [NOTEBOOK ...]`.

Default: all in notebooks/. A second run changes as little as possible: no times are kept, random
ids are numbered, and each process computes on one thread.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# Bars would show how long a stage took; without ipywidgets, tqdm warns before the first.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress"}
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def fingerprint(notebook: NotebookNode) -> str:
    """Return a hash of the code, which the outputs are stored with."""
    code = "\0".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def shorten(notebook: NotebookNode) -> None:
    """Assign the short values, which the metadata of the cell tagged `parameters` has, after it."""
    (cell,) = [c for c in code_cells(notebook) if "parameters" in c.metadata.get("tags", [])]
    short = "\n".join(f"{name} = {value!r}" for name, value in cell.metadata["short"].items())
    position = notebook.cells.index(cell) + 1
    notebook.cells.insert(position, nbformat.v4.new_code_cell(short))


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run a notebook in a folder, and keep its outputs without what differs from run to run."""
    metadata = dict(notebook.metadata)
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=600, record_timing=False, resources=place)
    client.execute(env={**os.environ, **ENVIRONMENT})
    notebook.metadata = NotebookNode(metadata)  # without the version of Python
    ids: dict[str, str] = {}
    for cell in code_cells(notebook):
        # progress and warnings, with times and names of temporary files; the author sees them
        sys.stderr.writelines(o.text for o in cell.outputs if o.get("name") == "stderr")
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for data in (output.data for output in cell.outputs if "data" in output):
            if "text/html" in data:
                html = data["text/html"]
                data["text/html"] = UUID.sub(
                    lambda id: ids.setdefault(id[0], f"id-{len(ids)}"), html
                )


def main(paths: list[Path]) -> None:
    """Run each notebook in an empty folder, and write it in place."""
    for path in paths:
        started = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        notebook.metadata["fingerprint"] = fingerprint(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or NOTEBOOKS)
