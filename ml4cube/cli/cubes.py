"""`split`, `stats` and `sample`: from a cube to sample stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ml4cube.cli.by_name import Names, load
from ml4cube.cli.command import Command
from ml4cube.cli.files import check_free, check_ours
from ml4cube.cli.inputs import OpenCube, read_statistics
from ml4cube.cli.task import NOTHING, Keep, Report, Task, as_table
from ml4cube.core.errors import InvalidValueError

_SPLITS = {
    method: f"ml4cube.splits:assign_{method}_split"
    for method in ("block", "time", "region", "rand")
}


def split(
    cube: str,
    /,
    *,
    out: str,
    method: str = "block",
    overwrite: bool = False,
    open_cube: OpenCube,
    **arguments: Any,
) -> Task:
    """Split a cube into train, validation and test, and write the recipe of the label.

    The recipe is a small JSON file, from which the other commands (--recipe) and
    ml4cube.splits.apply_split make the label again. The cube is not changed.

    Parameters
    ----------
    cube : path or URL
        The cube: zarr or netCDF.
    out : path or URL, ending in .json
        Where to write the recipe.
    method : {"block", "time", "region", "rand"}
        Function that assigns the parts: assign_block_split and so on. It decides which of the
        other arguments there are.
    overwrite : bool
        Replace a recipe at out.
    """
    import xarray as xr

    from ml4cube.core.split_plan import EXCLUDED, PARTS
    from ml4cube.cube.masks_and_labels import RECIPE_ATTR

    check_free(out, overwrite)
    label = load(_SPLITS[method])(open_cube(cube), **arguments)["split"]
    codes = {**PARTS, "excluded": EXCLUDED}
    # in one pass
    shares = xr.Dataset({part: (label == code).mean() for part, code in codes.items()}).compute()
    shown = {str(part): float(share) for part, share in shares.items()}
    report = Report.of(out=out, cells=label.size, **shown)

    def run(keep: Keep) -> Report:
        keep(f"{out}.yaml", {out: label.attrs[RECIPE_ATTR]})
        return report

    return Task(lambda: report, run)


def stats(
    cube: str,
    /,
    *,
    out: str | None = None,
    overwrite: bool = False,
    open_cube: OpenCube,
    **arguments: Any,
) -> Task:
    """Compute statistics of the train part, or of another one, in one pass over the cube.

    Parameters
    ----------
    cube : path or URL
        The cube: zarr or netCDF, with a split label if it has one.
    out : path or URL, ending in .json, optional
        Where to write the statistics; sample reads them with --statistics.
    overwrite : bool
        Replace statistics at out.
    """
    from ml4cube.cube.variables import data_variables, split_label
    from ml4cube.preprocessing import Statistics

    if out is not None:
        check_free(out, overwrite)
    ds = open_cube(cube)
    plan = Report.of(variables=data_variables(ds), label=split_label(ds), out=out)

    def run(keep: Keep) -> Report:
        statistics = Statistics.from_cube(ds, **arguments)
        if out is not None:
            keep(f"{out}.yaml", {out: statistics.to_json()})
        measured = _measured(statistics, arguments.get("quantiles") or ())
        text = f"part: {statistics.part}\n{as_table(map(_in_one_row, measured.values()))}"
        return Report({"part": statistics.part, "variables": measured}, text)

    return Task(lambda: plan, run)


def _measured(statistics: Any, quantiles: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return the numbers of each variable, arrays along the dims that were kept."""
    from ml4cube.core.sums.fields import quantile_of

    return {
        name: {
            "variable": name,
            "dims": list(getattr(numbers, "dims", ())),
            **{
                m: getattr(numbers, m)
                for m in ("count", "gaps", "infs", "mean", "std", "min", "max")
            },
            **{f"q{p:g}": quantile_of(numbers, p) for p in quantiles},
        }
        for name, numbers in statistics.items()
    }


def _in_one_row(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a variable for a table; of arrays, the least and the largest."""
    import numpy as np

    row = dict(measured)
    for name, value in row.items():
        if isinstance(value, np.ndarray):
            ends = [value.min().item(), value.max().item()]
            row[name] = " … ".join(f"{end:.6g}" for end in ends) if value.ndim else ends[0]
    return row


def sample(
    cube: str,
    /,
    *,
    callback: str | Mapping[str, Any] | None = None,
    statistics: str | None = None,
    names: Names,
    open_cube: OpenCube,
    **arguments: Any,
) -> Task:
    """Cut samples from a cube and write one store per part.

    A killed run goes on from where it stopped. --dry-run reads the cube once and counts samples.

    Parameters
    ----------
    cube : path or URL
        The cube: zarr or netCDF, with a split label if it has one.
    callback : module:name, or mapping with class and arguments, optional
        Function of a module in the working directory, or installed: takes a dict of arrays (n,
        *window) and returns one.
    statistics : path or URL, optional
        Statistics to scale by instead of those of the train samples: the file that ml4cube stats
        writes, or a sample store.
    """
    from ml4cube.datasets.multiproc_sampler import MultiProcSampler

    sampler = MultiProcSampler(
        open_cube(cube),
        callback=names.make("callback", callback),
        statistics=read_statistics(statistics),
        **arguments,
    )

    sampled = sampler.cube.recipe
    is_alone = bool(sampled.targets) and {*sampled.variables} <= {*sampled.targets}
    if is_alone and callback is None:  # which can add variables
        raise InvalidValueError(
            f"to_pred={list(sampled.targets)} leaves no variable to predict from; sample more "
            "variables, or leave out to_pred and name the target in the training, with an offset: "
            f"--set data.to_pred={sampled.targets[0]} --set data.target_offset.DIM=1"
        )
    stores = {part: str(target) for part, target in sampler.targets.items()}
    for store in stores.values():
        check_ours(f"{store}.yaml")

    def run(keep: Keep) -> Report:
        summary = sampler.run()
        for store in stores.values():  # also where an earlier call found no room for it
            keep(f"{store}.yaml")
        if summary is None:
            return Report({"stores": stores}, exit_code=NOTHING)
        values: dict[str, Any] = {
            "accounting": summary.plan.accounting,
            "nbytes": summary.nbytes,
            "stores": stores,
        }
        values |= {"resumed": summary.resumed, "seconds": summary.seconds}
        return Report(values, str(summary))

    def plan() -> Report:
        counted = sampler.plan()
        values = {"accounting": counted.accounting, "nbytes": counted.nbytes, "stores": stores}
        return Report(values, str(counted))

    return Task(plan, run)


SPLIT = Command(split, _SPLITS, without=["ds", "name", "recipe"], choice="method")
STATS = Command(stats, "ml4cube.preprocessing:Statistics.from_cube", without=["ds"])
SAMPLE = Command(
    sample, "ml4cube.datasets.multiproc_sampler:MultiProcSampler", without=["ds", "client"]
)
