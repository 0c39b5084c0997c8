"""What must be known to trust a scorecard: cells left out, few levels, years or dates."""

from __future__ import annotations

import warnings

from ml4cube.core.errors import InvalidValueError, caller_level
from ml4cube.core.metric_registry import METRICS
from ml4cube.evaluation.cells.baselines import FROM_CLIMATOLOGY
from ml4cube.evaluation.cells.climatology import ClimatologyOptions, warn_of_years
from ml4cube.evaluation.cells.probabilities import LEAST_LEVELS
from ml4cube.evaluation.scorecard import Scorecard


def warn_of_cells_left_out(card: Scorecard, normal: ClimatologyOptions | None) -> None:
    """Say how many cells with a truth are in no score, and for which model."""
    for variable, rows in card.sums.rows.items():
        dims = [dim for dim in rows["count"].dims if dim != "model"]
        scored = int(rows["count"].sum(dims).values[0])
        missing = rows["unpredicted"].sum(dims).values
        most = int(missing.max())
        if not scored and not most:
            raise InvalidValueError(
                f"no cell of {variable!r} can be scored: {card.attrs['scored']} have no value at "
                "the dates of the prediction; split=None scores all cells"
            )
        model = card.sums.models[missing.argmax()]
        if not scored:
            why = ""
            if normal is not None and model in FROM_CLIMATOLOGY:
                why = f", because {normal.why_unknown}"
            raise InvalidValueError(
                f"no cell of {variable!r} can be scored: {model!r} has no value in any cell with a "
                f"truth{why}; leave it out"
            )
        if most:
            warnings.warn(
                f"{variable!r}: no model is scored where one lacks a value: {model!r} does in "
                f"{most:,} cells with a truth, {scored:,} are scored; see `unpredicted`",
                stacklevel=caller_level(),
            )


def warn_of_scores(card: Scorecard, normal: ClimatologyOptions | None) -> None:
    """Warn of few quantiles, few years and few dates."""
    if "crps" in card.metrics:
        for name, n in card.few_levels.items():
            warnings.warn(
                f"crps of {name!r} is the weighted quantile loss of {n} levels, not the CRPS, "
                f"which needs {LEAST_LEVELS} or more; compare it with that of the same levels only",
                stacklevel=caller_level(),
            )
    needs_climatology = any(METRICS[name].needs_climatology for name in card.metrics)
    needs_climatology |= not {*card.sums.models}.isdisjoint(FROM_CLIMATOLOGY)
    if normal is not None and needs_climatology:
        warn_of_years(normal)
    if card.why_no_interval:
        warnings.warn(
            f"scores have no intervals, and nothing is decided: {card.why_no_interval}; score more "
            "dates, or set block_length",
            stacklevel=caller_level(),
        )
