"""Baselines: forecasts that need no model, from the truth and its climatology alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ml4cube.core.climatology import Climatology
from ml4cube.evaluation.cells.cell_reader import Floats, LoadedCells, Steps
from ml4cube.evaluation.cells.timing import Timing

#: Name of the prediction among the models.
PREDICTION = "prediction"
CLIMATOLOGY, PERSISTENCE = "climatology", "persistence"
DAMPED, ANOMALY = "damped_persistence", "anomaly_persistence"
#: Baselines that start from the value at the last input step.
FROM_INIT = (PERSISTENCE, DAMPED, ANOMALY)
BASELINES = (CLIMATOLOGY, *FROM_INIT)
#: Baselines that need a climatology.
FROM_CLIMATOLOGY = (CLIMATOLOGY, DAMPED, ANOMALY)


def baseline_values(
    names: Iterable[str],
    rows: Steps,
    timing: Timing,
    truth: LoadedCells,
    climatology: Climatology | None,
    damping: Floats | None,
) -> dict[str, Floats]:
    """Return the values of baselines, shape (rows, *cells); NaN where one is unknown."""
    samples, leads = np.divmod(rows, timing.leads.size)
    inits = timing.init_steps[samples]
    values: dict[str, Floats] = {}
    if climatology is not None:
        normal = climatology.at(timing.valid_steps.ravel()[rows])
        values[CLIMATOLOGY] = normal
    for name in names:
        if name == CLIMATOLOGY:
            continue
        start = truth.at({timing.time_dim: inits})
        if name == PERSISTENCE:
            values[name] = start
            continue
        assert climatology is not None
        anomaly = start - climatology.at(inits)
        if name == DAMPED:
            assert damping is not None
            anomaly = damping[leads] * anomaly
        values[name] = normal + anomaly
    return {name: values[name] for name in names}
