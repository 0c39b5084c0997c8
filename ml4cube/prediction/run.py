"""One prediction, from models and a cube to the predicted cube."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.reader import CubeReader
from ml4cube.prediction.block import BlockPredictor
from ml4cube.prediction.geometry import Windows
from ml4cube.prediction.layout import Expected, Layout
from ml4cube.prediction.models import Model, device_of, input_dtype, running
from ml4cube.prediction.output.opening import check_output, make_output, output_location
from ml4cube.prediction.output.same_call import call_of, source_state
from ml4cube.prediction.sharing import choose_blocks, engine_for, predict_blocks, probe
from ml4cube.prediction.template import make_template
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.training.ranks.dist import World

# Bytes of inputs in a batch of default size: what a core's cache holds, and what keeps a GPU busy.
_CPU_BATCH_BYTES, _GPU_BATCH_BYTES = 2**19, 2**26


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Arguments of `predict_cube` about how a model is run, and where its results go."""

    out: Any
    mask: str | None
    keep_gaps: bool
    batch_size: int | None
    device: str | torch.device | None
    overwrite: bool
    append: bool
    progress: bool
    reduce: str | None
    samples: int | None
    seed: int
    client: Any
    missing_chunks: str


def run(
    models: Sequence[Model],
    cube: xr.Dataset,
    bound: BoundRecipe,
    windows: Windows,
    expected: Expected,
    options: RunOptions,
) -> xr.Dataset:
    """Predict a cube; `expected` is what is known of the models' results before the first one."""
    has_doubles = any(cube[name].dtype == np.float64 for name in bound.features)
    dtype = input_dtype(models, has_doubles)
    batch_size = options.batch_size
    device = device_of(models[0], options.device)
    if batch_size is None:
        batch_size = _windows_per_call(bound, windows, dtype, device)
    location = output_location(options.out)
    targets = bound.recipe.predicted
    dtypes = {name: cube[name].dtype for name in targets if name in cube.data_vars}
    names = (*targets, *windows.dims, *map(str, cube.coords))
    replacing = {"overwrite": options.overwrite, "append": options.append}
    check_output(location, names, dtypes, **replacing)

    mask = options.mask or bound.mask
    read = list(dict.fromkeys((*bound.features, *filter(None, (options.mask, bound.mask)))))
    heeded = heed_absent_chunks(cube, read, options.missing_chunks, mask=mask)
    source = source_state(cube, read, location)
    world = World.current("cpu")  # blocks travel in main memory
    reader = CubeReader.of(heeded.cube, read, tuple(windows.dims))
    engine = engine_for(options.client, world, device, reader)
    random = options.samples, options.seed
    with running(models, options.device, dtype, *random, bound.channels) as members:
        predictor = BlockPredictor(
            members,
            bound,
            windows,
            Layout.plain(expected),
            reader,
            options.mask,
            options.keep_gaps,
            options.reduce,
            members.fixed_batch or batch_size,
        )
        predictor = probe(predictor, cube, expected, world)
        blocks = choose_blocks(predictor, cube)
        template = make_template(
            cube,
            predictor.windows,
            predictor.layout,
            dict(zip(blocks.dims, blocks.tile, strict=True)),
            members.input_dtype,
            _description(models, bound, windows),
            with_spread=len(members) > 1,
            reduce=options.reduce,
        )
        names = tuple(str(name) for name, v in template.data_vars.items() if v.chunks is not None)
        # The template has the layout of the results.
        settings = {
            "features": bound.channels,
            "targets": targets,
            "mask": options.mask,
            "mask of features": bound.mask,
            "fill": bound.fills,
            "scaling": bound.scaling,
            "coordinates": bound.coordinates,
            "windows": windows,
            "keep_gaps": options.keep_gaps,
            "reduce": options.reduce,
            "batch_size": predictor.batch_size,
            "device": str(options.device),
            "samples": options.samples,
            "seed": options.seed,
            "chunks that are gaps": sorted(heeded.dropped),
            "append": options.append,
        }
        call = None
        if source is not None:
            call = call_of(models, template, settings, source)
        output = make_output(location, template, names, world, **replacing, call=call)
        if output.is_written:
            return output.result()

        def check_source() -> None:
            if source is not None:
                source.check_unchanged(location)

        return predict_blocks(
            predictor, blocks, output, world, engine, options.progress, check_source
        )


def _windows_per_call(
    bound: BoundRecipe, windows: Windows, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the default number of windows per call of the model."""
    values = math.prod(windows.input_window.values()) * len(bound.channels)
    window_bytes = values * dtype.itemsize
    budget = _CPU_BATCH_BYTES if device.type == "cpu" else _GPU_BATCH_BYTES
    return max(1, budget // window_bytes)


def _description(models: Sequence[Model], bound: BoundRecipe, windows: Windows) -> dict[str, Any]:
    """Describe model and windows in JSON values, for the attributes of the predicted cube."""
    named = type(models[0]) if not hasattr(models[0], "__name__") else models[0]
    description: dict[str, Any] = {
        "model": getattr(named, "__name__", type(models[0]).__name__),
        "features": bound.channels,
        "targets": bound.recipe.predicted,
        "window": {dim: of_dim.known_size for dim, of_dim in windows.dims.items()},
        "overlap": {dim: of_dim.shared for dim, of_dim in windows.dims.items()},
    }
    if windows.rollout > 1:
        description["rollout"] = windows.rollout
    return description
