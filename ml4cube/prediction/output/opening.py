"""Make the output of a prediction."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidValueError, StoreExistsError
from ml4cube.ledger.call import CallId
from ml4cube.ledger.draft import WriteErrors, is_taken, remove_work_folder
from ml4cube.ledger.locations import Location, folder_of, is_in_memory, target_of
from ml4cube.prediction.output.appending import Extension, prepared
from ml4cube.prediction.output.files import PREDICTIONS, check_template, recorded_call
from ml4cube.prediction.output.memory import Output
from ml4cube.prediction.output.netcdf import check_netcdf, is_netcdf
from ml4cube.prediction.output.stored import StoreOutput
from ml4cube.prediction.template import storable
from ml4cube.store.names import check_writable_names
from ml4cube.training.ranks.dist import World


def output_location(out: Any) -> Location | None:
    """Return where a predicted cube is written, or None for memory."""
    if out is None:
        return None
    location = target_of("out", out)
    if isinstance(location, Path):
        if location.suffix != ".zarr" and not is_netcdf(location):
            raise InvalidValueError(f"out must end in '.zarr' or '.nc', got {str(location)!r}")
        if not location.parent.is_dir():
            raise InvalidValueError(f"out={str(location)!r} is in a folder that does not exist")
    elif str(location).endswith((".nc", ".nc4")):
        raise InvalidValueError(
            f"out={str(location)!r}: a netCDF file is written to a local path only; write '.zarr'"
        )
    return location


def check_output(
    location: Location | None,
    names: Iterable[str],
    dtypes: Mapping[str, np.dtype[Any]],
    *,
    overwrite: bool,
    append: bool,
) -> None:
    """Raise if names, or targets of some dtypes, cannot be written at a location."""
    if append:
        _check_append(location, overwrite)
    if location is None:
        return
    check_writable_names(names, netcdf=is_netcdf(location))
    if isinstance(location, Path) and is_netcdf(location):
        check_netcdf(location, dtypes)
    with WriteErrors.of(location):
        is_free = PREDICTIONS.may_write(folder_of(location), overwrite)
    if not is_free and not append:
        recorded_call(location)  # refuses what is not complete


def make_output(
    location: Location | None,
    template: xr.Dataset,
    targets: tuple[str, ...],
    world: World,
    *,
    overwrite: bool = False,
    append: bool = False,
    call: CallId | None = None,
) -> Output:
    """Make the output at a location, or in memory.

    `template` is the predicted cube without values, in chunks that no block divides. `call`
    identifies what is predicted: its finished cube is opened, and blocks of its killed run are
    used. None: nothing is.
    """
    if location is None:
        return Output(template, targets, world)
    check_template(location, template)
    ids = world.gather_objects(call and call.id)
    if len(ids) > 1:
        _check_shared(location)
    if len(set(ids)) > 1:  # the ranks have other models
        call = None
    with WriteErrors.of(location):
        exists = not overwrite and is_taken(folder_of(location))
        if append and not exists:
            template = prepared(template)
        template = storable(template)
        is_written = exists and _is_finished(location, template, targets, world, append, call)
    output = StoreOutput(
        template, targets, world, location, overwrite=overwrite, append=append and exists, call=call
    )
    output.is_written = is_written
    if is_written and world.is_main:
        # of a run that was killed after its last step
        remove_work_folder(location, call.id if call else "", PREDICTIONS)
    return output


def _check_shared(location: Location) -> None:
    """Refuse a place that only one of several ranks could write to."""
    if folder_of(location).is_session or is_in_memory(location):
        raise InvalidValueError(
            f"out={str(location)!r} can be written by one process only; with several ranks, write "
            "to a path or a URL"
        )


def _is_finished(
    location: Location,
    template: xr.Dataset,
    targets: tuple[str, ...],
    world: World,
    append: bool,
    call: CallId | None,
) -> bool:
    """Return True if a cube that exists has all that is asked for; refuse that of another call."""
    if append:
        return Extension.of(location, template, targets) is None
    _check_finished(location, call, world)
    return True


def _check_finished(location: Location, call: CallId | None, world: World) -> None:
    """Refuse a finished cube unless this call made it; say that it is only opened."""
    record = recorded_call(location)
    if call is None:
        raise StoreExistsError(
            f"{location} exists, and this call cannot be identified; choose another path or pass "
            "overwrite=True"
        )
    call.check_made(location, record)
    if world.is_main:
        warnings.warn(
            f"nothing was predicted: {location} exists already, complete and made by the same "
            "call. overwrite=True predicts it again",
            UserWarning,
            stacklevel=5,
        )


def _check_append(location: Location | None, overwrite: bool) -> None:
    """Raise unless steps can be appended at a location."""
    if overwrite:
        raise InvalidValueError("append must be False with overwrite=True, got True; choose one")
    if location is None or is_netcdf(location):
        place = "without out=" if location is None else f"with out={str(location)!r}"
        raise InvalidValueError(
            f"append must be False {place}, got True; steps are appended to a zarr store only"
        )
