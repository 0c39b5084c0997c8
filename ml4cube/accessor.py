"""``ds.ml4cube``: the functions that take a cube, as its methods, once this module is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import xarray as xr

from ml4cube.core.display import Summarized, Summary
from ml4cube.core.errors import check_choice
from ml4cube.store.names import netcdf_attrs

_DOC = """Call `{}` with this cube.

Parameters
----------
*args, **kwargs : Any
    Its other arguments.

Returns
-------
object
    What it returns.
"""


def _split_methods() -> list[str]:
    """Return what stands between ``assign_`` and ``_split`` in the names of `ml4cube.splits`."""
    splits = importlib.import_module("ml4cube.splits")
    names = [name for name in vars(splits) if name.startswith("assign_")]
    return [name.removeprefix("assign_").removesuffix("_split") for name in names]


def _method(module: str, name: str, position: int = 0) -> Callable[..., Any]:
    """Return a method that calls a function, which takes the cube at a position."""

    def method(self: CubeAccessor, *args: Any, **kwargs: Any) -> Any:
        function = getattr(importlib.import_module(module), name)
        return function(*args[:position], self._ds, *args[position:], **kwargs)

    method.__name__ = name
    method.__doc__ = _DOC.format(f"{module}.{name}")
    return method


@xr.register_dataset_accessor("ml4cube")  # type: ignore[no-untyped-call]
class CubeAccessor(Summarized):
    """The functions of ml4cube that take a cube, as methods of a Dataset.

    `split` calls one of the functions ``assign_<method>_split`` of `ml4cube.splits`; `leakage`,
    `statistics`, `insights`, `fill_gaps`, `predict` and `evaluate` (of a prediction) call
    `leakage_report`, `get_statistics`, `get_insights`, `fill_gaps`, `predict_cube` and
    `evaluate`; `sampler` makes a `MultiProcSampler`. The arguments are the others of these.

    Parameters
    ----------
    ds : Dataset
        The cube.

    Examples
    --------
    >>> import ml4cube.accessor
    >>> import numpy as np
    >>> ds = xr.Dataset({"t": (("time", "x"), np.arange(80.0).reshape(20, 4))})
    >>> cube = ds.ml4cube.split("time", 0.7)
    >>> cube.ml4cube.statistics()["t"][0]
    27.5
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    def _summary(self) -> Summary:
        methods = [name for name in dir(self) if not name.startswith("_")]
        return Summary(facts={"Cube": dict(self._ds.sizes), "Methods": methods})

    def split(self, method: str = "block", /, *args: Any, **kwargs: Any) -> xr.Dataset:
        """Return the cube with a label of its train, validation and test part.

        Parameters
        ----------
        method : str
            Which function of `ml4cube.splits` assigns the parts: "block", "time", "region",
            "location" or "rand".
        *args, **kwargs : Any
            The other arguments of it.

        Returns
        -------
        Dataset
            The cube with the variable ``split``.

        Raises
        ------
        InvalidValueError
            If there is no such method, or an argument of it is invalid.
        """
        check_choice("method", method, _split_methods())
        cube: xr.Dataset = _method("ml4cube.splits", f"assign_{method}_split")(
            self, *args, **kwargs
        )
        return cube

    def to_netcdf(self, path: Any, **arguments: Any) -> None:
        """Write a Dataset as netCDF, with attributes that it cannot hold as JSON text.

        Of a sample store these are the accounting, the statistics and others. `PTXrDataset` takes
        the file, opened by xarray, as it takes the store.

        Parameters
        ----------
        path : str or path
            The file to write.
        **arguments : Any
            Others of `xarray.Dataset.to_netcdf`.
        """
        cube = self._ds.copy()  # with attributes of its own
        for attrs in (cube.attrs, *(variable.attrs for variable in cube.variables.values())):
            attrs.update(netcdf_attrs(attrs))
        cube.to_netcdf(path, **arguments)

    leakage = _method("ml4cube.splits", "leakage_report")
    statistics = _method("ml4cube.preprocessing", "get_statistics")
    insights = _method("ml4cube.insights", "get_insights")
    fill_gaps = _method("ml4cube.gap_filling", "fill_gaps")
    sampler = _method("ml4cube.datasets.multiproc_sampler", "MultiProcSampler")
    predict = _method("ml4cube.prediction", "predict_cube", position=1)
    evaluate = _method("ml4cube.evaluation", "evaluate")
