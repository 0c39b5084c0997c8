"""`evaluate`: compare a prediction and baselines with the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ml4cube.cube.areas import Weights
from ml4cube.evaluation import arguments
from ml4cube.evaluation.arguments import Baselines
from ml4cube.evaluation.cautions import warn_of_cells_left_out, warn_of_scores
from ml4cube.evaluation.cells.labels import Labels
from ml4cube.evaluation.compared_cubes import open_cubes
from ml4cube.evaluation.scorecard import Scorecard
from ml4cube.evaluation.scores.intervals import Intervals
from ml4cube.evaluation.sums.named_sums import NamedSums
from ml4cube.evaluation.sums.score_options import ScoreOptions
from ml4cube.evaluation.sums.score_sums import sum_up, sums_to_keep
from ml4cube.evaluation.sums.scored_variable import ScoredVariable
from ml4cube.progress import Stage


def evaluate(
    prediction: Any,
    truth: Any,
    *,
    baselines: Baselines = (),
    by: Any = None,
    metrics: str | Sequence[str] | None = None,
    climatology: Any = None,
    split: str | None = "test",
    weights: Weights = "area",
    level: float = 0.95,
    block_length: int | None = None,
    data: Any = None,
    predict: Mapping[str, Any] | None = None,
    progress: bool = True,
    missing_chunks: str = "warn",
) -> Scorecard:
    """Compare a prediction, and baselines beside it, with the true cube.

    A value of a forecast is compared with the truth at its ``valid_time``. All models are scored on
    the same cells: those where the truth, the prediction and every baseline have a value. Scores
    follow from sums over blocks, so memory does not grow with the number of dates.

    Parameters
    ----------
    prediction : Dataset, DataArray, path, or model
        A forecast with the dims ``("init_time", "lead_time", *others)``, as from `predict_cube`, or
        a plain prediction with the dims of the truth. It may have a dim ``member``, ``quantile``,
        or ``class`` (probabilities of the labels that the truth has, or of their names in its
        ``flag_meanings``). Labels of classes are known by CF's ``flag_values`` or
        ``flag_meanings``, or if prediction and truth both hold booleans; integers without flags
        are quantities. A model is given to `predict_cube` with `truth`, `data` and `predict`.
    truth : Dataset, DataArray or path
        The true cube, with one time dim in increasing order. Variables of both are scored. Dates
        that it lacks are left out and counted. Its split label, if any, says which cells are for
        training, and which are scored.
    baselines : str, mapping, or sequence of these, optional
        ``"persistence"``: the value at ``init_time``, the last input step. ``"climatology"``: the
        mean of the train cells, see `climatology`; in ``crps`` beside members or quantiles, their
        distribution around it in the month and its neighbours, at the same quantiles or at 50.
        ``"anomaly_persistence"``: the climatology plus the anomaly at ``init_time``.
        ``"damped_persistence"``: the same with the anomaly times rho, one for each lead time and
        cell: the slope of the least-squares line through zero of later on earlier train anomalies.
        A mapping ``{name: cube}`` gives forecasts of others, or cubes with the time dim of the
        truth.
    by : str, DataArray or sequence of these, optional
        Separate scores for each ``"lead_time"``, ``"init_time"``, ``"season"`` or ``"month"`` of
        the date that is predicted, variable or coordinate of the truth (``"region"``), dim
        (``"lat"``), or label of an array along dims of the truth or of the forecast, as in
        `score_cube`. Cells whose label is NaN are left out. Several are combined. Default: one
        score over all.
    metrics : str or sequence of str, optional
        Names such as ``rmse``, ``mae``, ``bias``, ``acc``, ``crps``; of classes ``accuracy``,
        ``brier``. The error for an unknown name lists all, and the page on evaluation says which
        apply to what, and are shown by default. Skill over each baseline is always added.
    climatology : str, int, slice, Dataset or DataArray, optional
        The climatology: ``"month"`` or ``"season"``: a mean of each; ``"dayofyear"``: three
        harmonics of the year; ``"dayofyear_hour"``: two of the day as well, which change with the
        season; ``"hour"``: these alone; ``"31D"``: the mean of a moving window of so many days, at
        each hour of data below a day; a number: so many harmonics of the year; ``"mean"``: none of
        these. Default by the median step of the truth: ``"dayofyear_hour"`` below a day,
        ``"dayofyear"`` up to 16 days, ``"month"`` up to half a year, else ``"mean"``. Where the
        train dates do not show the year (all months of the dates that are predicted and, for
        harmonics, 330 days), it is ``"hour"`` below a day, else ``"mean"``. It is of the cells
        whose split label is train; without a label, of the dates before the first of the
        prediction, with a warning. A slice of times says which dates to take; of these only train
        cells, if there is a label. A cube with dims of some of ``month``, ``season``,
        ``dayofyear``, ``hour`` is used as it is. The attribute ``climatology`` says from how many
        years it is: below 10 there is a warning, since its noise counts as skill of the prediction;
        from one year there is no verdict.
    split : {"test", "val", "train", None}, default "test"
        Part to score, by the split label at the date that is predicted; None, or a truth without a
        label: all cells. A variable that lacks a dim of the label, such as levels, is in a part
        where all of these are.
    weights : str, DataArray or None, default "area"
        Weight of each cell of a step, as in `score_cube`; ``"area"`` are those of the truth.
    level : float, default 0.95
        Probability of the intervals.
    block_length : int, optional
        Consecutive forecasts, or dates of a plain prediction, that depend on one another; their
        number over it, at least two, is how many independent pieces intervals rest on. Default:
        what the errors themselves show, see Notes.
    data : PTXrDataset, store or path, optional
        How the data of a model's training were made; the argument `store_or_stats` of
        `predict_cube`.
    predict : mapping, optional
        Further arguments of `predict_cube`, such as ``{"out": "forecast.zarr"}``.
    progress : bool, default True
        Show a bar in terminals and notebooks, else write a line to stderr for each tenth of a long
        comparison.
    missing_chunks : {"warn", "raise", "drop"}, default "warn"
        What to do about chunks that the zarr store of a cube lacks and that read as values: warn,
        refuse them, or take their cells for gaps.

    Returns
    -------
    Scorecard
        ``scores``, ``table``, ``verdict``, ``map``, ``spectrum``, ``reliability``, ``classes``,
        ``confusion``, ``plot()``.

    Raises
    ------
    InvalidValueError
        If an argument is unknown, prediction and truth have no variable in common, other grids or
        calendars, no cell can be scored, a climatology has no train cells, or a plain prediction is
        compared with baselines that start from ``init_time``.
    InvalidTypeError
        If a baseline, label or climatology has the wrong type, or `data` or `predict` are given
        with a cube.

    Notes
    -----
    Sums are over all cells and dates of a label, with weight w; p is the mean of members, the
    median of quantiles (between two levels if 0.5 is none) or the only value, t the truth, c the
    climatology.

    - ``acc``, the anomaly correlation, is sum(w (p - c)(t - c)) / sqrt(sum(w (p - c)^2)
      sum(w (t - c)^2)), not centred, where a climatology is known.
    - ``skill`` is 1 - MSE / MSE of the baseline, and 0 if both are perfect; ``crps_skill`` is the
      same with the CRPS.
    - ``crps`` of members is the fair estimator [1]_; of quantiles, twice the pinball loss
      integrated over levels, where each given level stands for those nearest to it [2]_, which is
      called the weighted quantile loss where there are fewer than nine; of a single value, its
      absolute error.
    - ``spread_ratio`` is sqrt(mean variance of members (m + 1) / m) / RMSE, 1 if reliable [3]_.
    - Classes are never compared as numbers: each cell is 1 for its class and 0 for the others.
      ``brier`` is the sum over classes of the mean squared error of the probabilities, and
      ``log_loss`` the mean of -log(probability of the true class). The class of a model is its most
      likely one, of equal ones the first. ``accuracy`` is the share of cells with the true class,
      ``balanced_accuracy`` the mean recall of the true classes, ``kappa`` Cohen's. The climatology
      has the frequencies of the classes in the train cells, so its class is the most frequent one.
    - If the prediction has labels alone, baselines are labels too. Then ``skill`` is 1 - error rate
      / error rate of the baseline, and ``brier`` and ``log_loss`` are NaN.
    - Intervals hold where errors depend on those of earlier dates. The change of a score without
      each date (the jackknife) is a series, whose long-run variance follows from its slowest
      cosines, one for five independent dates and at most eight, with quantiles of Student's t for
      their number [4]_. ``_independent`` is how many independent dates the series is worth as a
      first-order autoregression [5]_, at most the number of dates over the longest lead time in
      steps, since overlapping forecasts have errors in common. Fewer than 15 dates, or dates worth
      fewer than ten independent ones, give no interval, and no verdict.
    - The sums by date hold 96 bytes for each variable, model, date, lead time and label, with
      classes 8 more, and 24 for each class.

    References
    ----------
    .. [1] Ferro (2014), Fair scores for ensemble forecasts, QJRMS 140.
    .. [2] Laio and Tamea (2007), Verification tools for probabilistic forecasts of continuous
       hydrological variables, HESS 11.
    .. [3] Fortin et al. (2014), Why should ensemble spread match the RMSE of the ensemble mean?,
       Journal of Hydrometeorology 15.
    .. [4] Lazarus, Lewis, Stock and Watson (2018), HAR inference: recommendations for practice,
       Journal of Business & Economic Statistics 36.
    .. [5] Marriott and Pope (1954), Bias in the estimation of autocorrelations, Biometrika 41.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> time = xr.date_range("2000-01-01", periods=48, freq="MS")
    >>> rng = np.random.default_rng(0)
    >>> sst = np.cos(np.pi * np.arange(48) / 6)[:, None] + rng.normal(size=(48, 6)) / 4
    >>> truth = xr.Dataset({"sst": (("time", "x"), sst)}, {"time": time})
    >>> truth["split"] = "time", (np.arange(48) < 24).astype("uint8")
    >>> prediction = truth[["sst"]].isel(time=slice(24, None)) + 0.1
    >>> card = evaluate(prediction, truth, baselines="climatology", progress=False)
    >>> round(card.scores.rmse.sel(variable="sst", model="prediction").item(), 3)
    0.1
    >>> card.verdict
    ['sst is better than climatology.']
    """
    intervals = Intervals(level, block_length)
    named, cubes_of_baselines = arguments.read_baselines(baselines)
    wanted = arguments.read_metrics(metrics)
    cubes = open_cubes(
        prediction,
        truth,
        cubes_of_baselines,
        named_baselines=named,
        data=data,
        predict=predict,
        progress=progress,
        missing_chunks=missing_chunks,
    )
    truth, timing = cubes.truth, cubes.timing
    labels = Labels.of(by, cubes.prediction, truth, timing)
    needing = (*named, *wanted)
    normal = arguments.climatology_options(truth, timing, climatology, cubes.names, needing)
    part, described_part = arguments.part_to_score(truth, split)
    kept = sums_to_keep(wanted)
    options = ScoreOptions(timing, named, normal, part, labels, weights, kept)
    variables = [ScoredVariable.of(name, cubes.models, truth, options) for name in cubes.names]
    arguments.check_size(variables, labels)
    n_blocks = sum(variable.n_blocks for variable in variables)
    sums = {}
    with Stage("evaluate", n_blocks, "blocks", show=progress) as stage:
        for variable in variables:
            sums[variable.name] = variable, sum_up(variable, normal, stage.update)
    wanted = wanted or arguments.applicable_metrics(variables, normal is not None)
    described_weights = dict.fromkeys(variable.described_weights for variable in variables)
    attrs: dict[str, Any] = {"weights": "; ".join(described_weights), "climatology": "none"}
    if normal is not None:
        attrs["climatology"] = normal.described
        if normal.years is not None:
            attrs["climatology_years"] = normal.years
    attrs["scored"] = described_part
    card = Scorecard(
        NamedSums.of(sums, truth, labels, attrs), labels.names, tuple(wanted), intervals
    )
    warn_of_cells_left_out(card, normal)
    warn_of_scores(card, normal)
    return card
