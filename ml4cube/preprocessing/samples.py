"""Samples and cubes that carry the count of what each stage removed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.missing import plain
from ml4cube.preprocessing import cubes

#: Prefix of the scalar coordinates that hold a Dataset's counts.
PREFIX = "accounting_"
#: Attribute of the total: what removed cells of a cube so far, as JSON.
STAGES = "ml4cube_stages"


class Samples(dict[str, NDArray[Any]]):
    """A dict of arrays (samples, *window) that knows how many samples were dropped, and why.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        By variable, all with the same number of samples.
    accounting : mapping of str to int
        ``total`` at the start, ``kept`` now, and the dropped ones by reason (``mask``,
        ``gap``); those add up to the total. ``filled`` counts cells, not samples.

    Examples
    --------
    >>> import numpy as np
    >>> from ml4cube.preprocessing import drop_nan_values
    >>> result = drop_nan_values({"t": np.array([[1.0, np.nan], [2.0, 3.0]])}, ["t"])
    >>> result["t"], result.accounting
    (array([[2., 3.]]), {'total': 2, 'kept': 1, 'gap': 1})
    """

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], accounting: Mapping[str, int] | None = None
    ) -> None:
        """Store the arrays as they are and copy the counts."""
        super().__init__(arrays)
        self.accounting: dict[str, int] = dict(accounting or {})


def accounting(result: Mapping[str, Any] | xr.Dataset | xr.DataArray) -> dict[str, int]:
    """Tell what `apply_filter`, `drop_nan_values` and `fill_nan_values` have removed and filled.

    Parameters
    ----------
    result : dict, Dataset or DataArray
        What one of them returned. Reading the counts of a lazy cube reads its masks and
        variables once.

    Returns
    -------
    dict of str to int
        ``total``, ``kept`` and one count for each reason (``mask``, ``gap``), which add up to
        the total; ``filled`` counts filled cells. Empty where nothing was counted. Of a cube
        that was cut, reduced, filled or renamed between stages, the last stage counts the cells
        that are there then; earlier stages count as far as their masks and gaps are still there.

    Examples
    --------
    >>> import numpy as np
    >>> from ml4cube.preprocessing import drop_nan_values
    >>> ds = xr.Dataset({"t": ("x", [1.0, np.nan, 3.0])}).chunk(x=1)
    >>> accounting(drop_nan_values(ds, ["t"]))
    {'total': 3, 'kept': 2, 'gap': 1}
    """
    if not isinstance(result, xr.Dataset | xr.DataArray):
        return dict(getattr(result, "accounting", {}))
    counts = recorded(result)
    computed = xr.Dataset({name: ((), count.data) for name, count in counts.items()}).compute()
    found = {name: int(computed[name]) for name in counts}
    if "total" not in found:
        return found
    removed = sum(count for name, count in found.items() if name not in ("total", "filled"))
    total = found.pop("total")
    return {"total": total, "kept": total - removed, **found}


def recorded(ds: xr.Dataset | xr.DataArray) -> dict[str, xr.Variable]:
    """Counts that a cube carries, lazy or not.

    Parameters
    ----------
    ds : Dataset or DataArray
        A cube.

    Returns
    -------
    dict of str to Variable
        Scalars by name.
    """
    return {
        str(name).removeprefix(PREFIX): coord.variable
        for name, coord in ds.coords.items()
        if str(name).startswith(PREFIX)
    }


def record(ds: xr.Dataset, counts: Mapping[str, Any], stages: Sequence[Any] = ()) -> xr.Dataset:
    """Let a cube carry counts, as scalar coordinates ``accounting_<name>``.

    Parameters
    ----------
    ds : Dataset
        A cube.
    counts : mapping of str to int or 0-d array
        Lazy ones stay lazy.
    stages : sequence
        What removed cells so far, kept with the total.

    Returns
    -------
    Dataset
        A new one.
    """
    coords = {
        PREFIX + name: xr.Variable((), count, {"long_name": f"accounting: {name}"})
        for name, count in counts.items()
    }
    if stages:
        coords[PREFIX + "total"].attrs[STAGES] = json.dumps(stages)
    return ds.assign_coords(coords)


def sample_arrays(
    samples: Mapping[str, Any], filter_var: str | None
) -> tuple[dict[str, NDArray[Any]], list[str], int]:
    """Read a dict of arrays, giving label and mask a dim of samples where they lack it.

    Parameters
    ----------
    samples : mapping of str to array (samples, *window)
        The label ``split`` and the mask may lack dims.
    filter_var : str, optional
        Name of the mask.

    Returns
    -------
    arrays : dict of str to ndarray
        Samples along the first dim of each; the arrays given, not copies.
    data : list of str
        Names of those that are neither label nor mask.
    n : int
        Number of samples.

    Raises
    ------
    InvalidValueError
        If there is no data, or numbers of samples differ.
    """
    arrays = {name: plain(values) for name, values in samples.items()}
    data = [name for name in arrays if name not in (filter_var, "split")]
    lengths = {name: arrays[name].shape[:1] for name in data}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        raise InvalidValueError(
            f"samples need arrays of one length along the first dim, found {lengths}"
        )
    for name in set(arrays).difference(data):
        arrays[name] = cubes.with_samples(arrays[name], arrays[data[0]].shape, name)
    return arrays, data, int(lengths[data[0]][0])
