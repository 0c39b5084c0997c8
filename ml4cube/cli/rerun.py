"""`rerun`: write a sample store again from the provenance that it holds, and compare the bytes."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml4cube.cli.by_name import Names
from ml4cube.cli.command import Command
from ml4cube.cli.inputs import read_statistics
from ml4cube.cli.task import FAILED, Keep, Report, Task
from ml4cube.core.errors import InvalidValueError, StoreError, StoreExistsError, prefixed

if TYPE_CHECKING:
    import xarray as xr

    from ml4cube.datasets.store import StoreMetadata

_VERSION = "version "


def rerun(
    store: str,
    /,
    *,
    out: str | None = None,
    callback: str | Mapping[str, Any] | None = None,
    statistics: str | None = None,
    engine: str | None = None,
    nproc: int = 1,
    progress: bool = True,
    names: Names,
) -> Task:
    """Write a sample store again from the provenance that it holds, and compare all bytes.

    The stores of all parts are written, since one call makes them together; the named one is
    compared. What cannot give the same bytes is refused: a source that is gone or has changed, a
    callback that cannot be imported or has changed, other versions of libraries. Exit code 1 if
    bytes differ.

    Parameters
    ----------
    store : path or URL
        The sample store, also a damaged one whose metadata can be read.
    out : path or URL, optional
        Folder for the stores. Default: a folder beside the store that is removed at the end.
    callback : module:name, or mapping with class and arguments, optional
        Callback of the store. It must be given, since a store may come from anyone, and what its
        provenance names is not imported.
    statistics : path or URL, optional
        Statistics that the call was given. Default: those of the store, which are only of the
        variables that it holds.
    engine : str, optional
        How xarray opens the source, if the call was given an engine. Default: as its ending says.
    nproc : int
        Worker processes.
    progress : bool
        Whether to show bars.
    """
    from ml4cube.datasets.multiproc_sampler import MultiProcSampler
    from ml4cube.datasets.store import StoreMetadata
    from ml4cube.ledger.manifest import read_manifest
    from ml4cube.store.format import verify_store

    metadata = StoreMetadata.of(store)
    files = read_manifest(store)

    def sampler(folder: str) -> MultiProcSampler:
        parts = metadata.provenance["settings"]["parts"]
        targets: dict[str, Any] = {f"{part}_cube": f"{folder}/{part}.zarr" for part in parts}
        return MultiProcSampler(cube, nproc=nproc, progress=progress, **targets, **arguments)

    with prefixed(f"{store} cannot be rerun"):
        arguments = _arguments(store, metadata) | _callback(metadata, callback, names)
        if statistics is not None:
            arguments["statistics"] = read_statistics(statistics)
        cube = _source(metadata, engine)
        call = sampler(out or os.path.dirname(os.path.abspath(store))).call()
        if call.id != metadata.provenance["call"]:
            raise InvalidValueError(call.unlike(metadata.provenance["call_parts"]))

    def work(keep: Keep) -> Report:
        with _folder(store, out) as folder:
            if sampler(folder).run() is None:
                raise StoreExistsError(f"{folder} has these stores already; give another --out")
            again = read_manifest(f"{folder}/{metadata.part}.zarr")
        differing = sorted(n for n in {*files, *again} if files.get(n) != again.get(n))
        values = {"store": store, "out": out, "files": len(files), "differing": differing}
        try:
            verify_store(store)
        except StoreError as error:
            return Report(values, f"{store} is damaged, and should be replaced: {error}", FAILED)
        if differing:
            shown = ", ".join(differing[:5])
            text = f"{store}: {len(differing)} of {len(files)} files differ: {shown}"
            return Report(values, text, FAILED)
        return Report(values, f"{store}: all {len(files)} files are byte-equal")

    plan = Report.of(store=store, source=metadata.provenance["source"], out=out)
    return Task(lambda: plan, work)


@contextlib.contextmanager
def _folder(store: str, out: str | None) -> Iterator[str]:
    """Yield the folder to write to, beside the store and for this call only if none is named."""
    if out is not None:
        if "://" not in out:
            Path(out).mkdir(parents=True, exist_ok=True)
        yield out
        return
    beside = None
    if "://" not in store:
        beside = os.path.dirname(os.path.abspath(store))
    with tempfile.TemporaryDirectory(prefix=".ml4cube-rerun-", dir=beside) as folder:
        yield folder


def _source(metadata: StoreMetadata, engine: str | None) -> xr.Dataset:
    """Open the cube that a store was made from, with its label, and the same variables in order."""
    from ml4cube.cube.opening import as_dataset
    from ml4cube.cube.variables import split_label
    from ml4cube.splits import apply_split

    provenance = metadata.provenance
    if provenance["source"] is None:
        raise InvalidValueError("it was made from a cube in memory")
    try:
        ds = as_dataset(provenance["source"], engine)
    except StoreError as error:
        hint = "" if engine else "; if the call was given an engine, give --engine"
        raise InvalidValueError(f"{error}{hint}") from None
    names = [*metadata.recipe.variables, *provenance["left_out"], metadata.recipe.filter_var]
    names += [split_label(ds)]
    ds = ds[[name for name in dict.fromkeys(names) if name in ds.data_vars]]
    if split_label(ds) is not None:
        return ds
    if not metadata.split:
        raise InvalidValueError("its split label was made by hand, and is not in the source")
    return apply_split(ds, json.dumps(metadata.split))


def _arguments(store: str, metadata: StoreMetadata) -> dict[str, Any]:
    """Return the arguments of `MultiProcSampler` that made a store, apart from cube and targets."""
    from zarr.codecs import BloscCodec

    recipe, settings = metadata.recipe, metadata.provenance["settings"]
    sizes = dict(zip(recipe.dims, recipe.size, strict=True))
    overlaps = zip(recipe.dims, recipe.overlap, strict=True)
    compressor, precision = settings["compressor"], settings["precision"]
    grid = metadata.split.get("plan", {}).get("grid")
    fills: Any = recipe.fill_method
    arguments: dict[str, Any] = {
        "sample_size": sizes,
        "overlap": {dim: cells / sizes[dim] for dim, cells in overlaps if cells},
        "to_pred": list(recipe.targets) or None,
        "features": recipe.features,
        "array_dims": list(recipe.array_dims),
        "fill_method": dict(fills) or None,
        "max_chunk_mb": math.inf,
        "compressors": BloscCodec(**compressor) if compressor["cname"] else None,
        "dtype": precision["dtypes"] or None,
        "bitround": precision["keepbits"] or None,
        "missing_chunks": settings.get("missing_chunks", "warn"),
    }
    arguments |= {
        n: getattr(recipe, n) for n in ("const", "drop_nan", "apply_mask", "drop_sample", "seed")
    }
    arguments |= {n: settings[n] for n in ("order", "data_fraq", "rand_chunk", "chunk_size")}
    if recipe.filter_var is not None:
        arguments["filter_var"] = recipe.filter_var
    # with given statistics, the store has their scaling
    arguments |= (
        {"statistics": store} if "statistics" in settings else {"scale_fn": recipe.scale_fn}
    )
    if settings["data_fraq"] < 1 and grid is not None:
        arguments["block_size"] = dict(zip(grid["dims"], grid["tile"], strict=True))
    return arguments


def _callback(metadata: StoreMetadata, named_callback: Any, names: Names) -> dict[str, Any]:
    """Return the callback of a call and its version."""
    name, provenance = metadata.recipe.callback, metadata.provenance
    if name is None:
        return {}
    path = named_callback or provenance.get("callback")
    if path is None:
        raise InvalidValueError(
            f"its callback {name!r} cannot be imported by a name; give --callback module:name"
        )
    identity = str(provenance["call_parts"]["callback"]["code, values or version"])
    is_version = identity.startswith(_VERSION)
    version = None
    if is_version:
        version = ast.literal_eval(identity.removeprefix(_VERSION))
    return {"callback": names.make("callback", path), "version": version}


RERUN = Command(rerun)
