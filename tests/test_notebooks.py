"""Notebooks have the outputs of their present code, and run in a short form."""

import ast

import nbformat
import pytest

from scripts.run_notebooks import NOTEBOOKS, code_cells, execute, fingerprint, shorten

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)


@each
def test_outputs_are_of_the_present_code(path):
    notebook = nbformat.read(path, as_version=4)
    code = code_cells(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    assert notebook.metadata.get("fingerprint") == fingerprint(notebook), "run `make notebooks`"
    assert path.stat().st_size < 500_000


@each
def test_short_values_are_of_parameters(path):
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [c for c in code_cells(notebook) if "parameters" in c.metadata.get("tags", [])]
    assigned = {s.targets[0].id: ast.literal_eval(s.value) for s in ast.parse(cell.source).body}
    assert cell.metadata["short"].keys() <= assigned.keys()
    assert all(type(assigned[name]) is type(v) for name, v in cell.metadata["short"].items())


@pytest.mark.slow
@each
def test_short_form_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    shorten(notebook)
    execute(notebook, tmp_path)
