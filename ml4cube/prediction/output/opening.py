"""Make the output of a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xarray as xr

from ml4cube.core.errors import InvalidValueError, StoreExistsError
from ml4cube.prediction.output.files import PREDICTIONS
from ml4cube.prediction.output.memory import Output
from ml4cube.prediction.output.netcdf import check_netcdf, is_netcdf
from ml4cube.prediction.output.stored import StoreOutput
from ml4cube.store.locations import Location, ZarrFolder
from ml4cube.store.publishing.local import restore_replaced
from ml4cube.store.publishing.overwriting import check_overwritable, is_taken
from ml4cube.store.publishing.targets import is_in_memory, target_of
from ml4cube.store.write_errors import WriteErrors
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


def make_output(
    location: Location | None,
    template: xr.Dataset,
    targets: tuple[str, ...],
    world: World,
    *,
    overwrite: bool = False,
    call_id: str | None = None,
) -> Output:
    """Make the output at a location, or in memory; raise if the location cannot be written.

    `template` is the predicted cube without values, in chunks that no block divides. `call_id`
    identifies what is predicted: blocks of a killed run of the same call are used. None: of none.
    """
    if location is None:
        return Output(template, targets, world)
    if world.size > 1 and (isinstance(location, ZarrFolder) or is_in_memory(location)):
        raise InvalidValueError(
            f"out={str(location)!r} can be written by one process only; with several ranks, write "
            "to a path or a URL"
        )
    if isinstance(location, Path) and is_netcdf(location):
        check_netcdf(location, template, targets)
    with WriteErrors.of(location):
        restore_replaced(location)
        if is_taken(location, PREDICTIONS):
            if not overwrite:
                raise StoreExistsError(
                    f"{location} exists; choose another path or pass overwrite=True"
                )
            check_overwritable(location, PREDICTIONS)
    return StoreOutput(template, targets, world, location, overwrite, call_id)
