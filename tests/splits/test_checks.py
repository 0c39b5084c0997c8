"""The table of checks that the leakage report runs."""

from __future__ import annotations

import importlib
import pkgutil

import pandas as pd
import pytest

from ml4cube.splits import assign_time_split, leakage, leakage_report
from ml4cube.splits.leakage.case import Case
from ml4cube.splits.leakage.findings import Findings
from ml4cube.splits.leakage.report import CHECKS
from ml4cube.splits.leakage.stores import check_stores
from tests.cubes import cell_id_cube


def test_every_check_is_in_the_table():
    checks = set()
    for module in pkgutil.iter_modules(leakage.__path__):
        name = f"{leakage.__name__}.{module.name}"
        for function, value in vars(importlib.import_module(name)).items():
            if function.startswith("check_") and value.__module__ == name:
                checks.add(value)
    assert checks == {*CHECKS, check_stores}


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_adds_its_rows_to_those_before(check):
    ds = assign_time_split(cell_id_cube({"time": 20, "lat": 4, "lon": 5}, "float64"), 0.6)
    case = Case.of(ds, None, None, "split", "warn")
    findings = Findings(case.part)
    if check is not CHECKS[0]:  # the others may look at its counts
        CHECKS[0](case, findings)
    rows = len(findings.rows)
    check(case, findings)
    added = findings.table().iloc[rows:]
    expected = leakage_report(ds).table.loc[added.index]
    pd.testing.assert_frame_equal(added, expected, check_dtype=False)
    assert set(added.status) <= {"ok", "leak", "warning", "unknown", ""}
