"""Random cubes and settings through split, sampler, store and loader, against a plain loop.

Each case draws a cube (dims, orders, chunks, gaps, static variables, a mask) and settings, runs
them through the package, and computes the same by the slowest, most obvious way. `make test-faults`
runs many more seeds than the suite does.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.errors import EmptyPartError
from ml4cube.splits import assign_block_split
from tests.cubes import coordinates
from tests.oracle import filled
from tests.oracle_sampler import sample_cube
from tests.oracle_splits import blocks_of, buffered, near_in_cells

pytestmark = pytest.mark.slow

PARTS = ("train", "test", "val")
DIMS = ("time", "lat", "lon", "level")


@dataclasses.dataclass
class Case:
    """What one seed draws."""

    cube: xr.Dataset
    dims: tuple[str, ...]
    block_size: dict[str, int]
    buffer: int
    size: dict[str, int]
    overlap: dict[str, float]
    drop_nan: str | None
    fill_method: str | None
    scale_fn: str | None
    target: str | None
    seed: int

    @classmethod
    def draw(cls, seed: int) -> "Case":
        rng = np.random.default_rng(seed)
        ndim = int(rng.integers(1, 4))
        dims = tuple(rng.permutation(DIMS)[:ndim].tolist())
        longest = {1: 40, 2: 14, 3: 8}[ndim]
        shape = {d: int(rng.integers(4, longest + 1)) for d in dims}
        cube = xr.Dataset(coords=coordinates(shape))
        for k in range(int(rng.integers(1, 4))):
            lacks = ndim > 1 and k > 0 and rng.random() < 0.3
            own = rng.permutation(dims)[: ndim - lacks].tolist()
            values = rng.normal(10 * k, 3, [shape[d] for d in own])
            values = values.astype(rng.choice(["f4", "f8"]))
            values[rng.random(values.shape) < rng.choice([0, 0.05, 0.4])] = np.nan
            cube[f"v{k}"] = (own, values)
        if rng.random() < 0.3:
            own = list(dims[: int(rng.integers(1, ndim + 1))])
            cube["filter_mask"] = (own, rng.random([shape[d] for d in own]) < 0.8)
        if rng.random() < 0.5:
            cube = cube.chunk({d: int(rng.integers(1, n + 1)) for d, n in shape.items()})
        cut = dims[: int(rng.integers(1, ndim + 1))]
        windowed = [d for d in dims if rng.random() < 0.6]
        size = {d: int(rng.integers(1, min(3, shape[d]) + 1)) for d in windowed}
        names = [str(name) for name in cube.data_vars if name != "filter_mask"]
        masked = ["masked"] if "filter_mask" in cube else []
        return cls(
            cube=cube,
            dims=tuple(str(d) for d in cube["v0"].dims),
            block_size={d: int(rng.integers(1, max(2, shape[d] // 3))) for d in cut},
            buffer=int(rng.random() < 0.3),
            size=size,
            overlap={d: float(rng.choice([0.0, 0.5])) for d in size},
            drop_nan=rng.choice(np.array([None, "auto", "if_all_nan", *masked], object)),
            fill_method=rng.choice(np.array([None, "constant", "mean", "sample_mean"], object)),
            scale_fn=rng.choice(np.array([None, "standardize", "normalize"], object)),
            target=names[-1] if len(names) > 1 and rng.random() < 0.6 else None,
            seed=seed,
        )


def split(case: Case) -> xr.Dataset | None:
    """Label the cube, and compare the label with one made block by block and cell by cell.

    None where the buffer takes every train cell.
    """
    arguments: dict[str, Any] = {"split": 0.6, "val": 0.2, "seed": case.seed}
    without = assign_block_split(case.cube, case.block_size, **arguments)
    assert set(without["split"].dims) <= set(case.dims)
    plain = without["split"].broadcast_like(case.cube["v0"]).transpose(*case.dims).values
    for block in blocks_of(plain, case.dims, case.block_size):
        assert len(set(block.tolist())) == 1
    if not case.buffer:
        return without
    width = dict.fromkeys(case.block_size, case.buffer)
    sizes = case.cube.sizes  # the cubes' longitudes go around the globe
    near = [near_in_cells(sizes[d], width.get(d, 0), d == "lon") for d in case.dims]
    right = buffered(plain, near)
    try:
        labelled = assign_block_split(case.cube, case.block_size, buffer=width, **arguments)
    except EmptyPartError:
        assert 1 not in right
        return None
    label = labelled["split"].broadcast_like(case.cube["v0"]).transpose(*case.dims).values
    np.testing.assert_array_equal(label, right)
    return labelled


def fill(case: Case, labelled: xr.Dataset, samples: dict[str, list[Any]]) -> None:
    """Fill gaps of every feature, in place; the target keeps its own."""
    names = [n for n in case.cube.data_vars if n not in ("filter_mask", case.target)]
    template = xr.zeros_like(case.cube["v0"])
    train = (labelled["split"] == 1).broadcast_like(template)
    if "filter_mask" in case.cube:
        train = train & case.cube["filter_mask"].broadcast_like(template)
    for name in names if case.fill_method else ():
        cells = case.cube[name].broadcast_like(template).transpose(*template.dims)
        known = cells.values[train.transpose(*template.dims).values].astype("f8")
        known = known[np.isfinite(known)].tolist() or [np.nan]
        for _, window in itertools.chain(*samples.values()):
            window[name] = filled(window[name], case.fill_method, known, 0.5).astype(cells.dtype)


def expected(case: Case, labelled: xr.Dataset) -> tuple[dict[str, int], dict[str, dict[Any, Any]]]:
    """Count windows by what becomes of them; return scaled samples by part and first cell."""
    names = [str(n) for n in case.cube.data_vars if n != "filter_mask"]
    mask = "filter_mask" if "filter_mask" in case.cube else None
    step = {d: int(f * case.size[d] + 0.5) for d, f in case.overlap.items() if case.size[d] > 1}
    step = {d: max(1, n) if case.overlap[d] else 0 for d, n in step.items()}
    counts, samples = sample_cube(
        labelled, names, case.size, step, drop_nan=case.drop_nan, mask=mask
    )
    fill(case, labelled, samples)
    for name in names:
        train = [window[name].ravel().astype("f8") for _, window in samples["train"]]
        cells = np.concatenate(train) if train else np.empty(0)
        cells = cells[np.isfinite(cells)]
        offset, scale = 0.0, 1.0
        if case.scale_fn == "standardize" and cells.size:
            offset, scale = cells.mean(), cells.std()
        elif case.scale_fn == "normalize" and cells.size:
            offset, scale = cells.min(), np.ptp(cells)
        for _, window in itertools.chain(*samples.values()):
            centred = window[name].astype("f8") - offset
            window[name] = centred / scale if scale > 0 else centred * 0.0
    return counts, {part: dict(found) for part, found in samples.items()}


def check(case: Case, folder: Any) -> bool:
    """Run one case; return whether it gave stores."""
    labelled = split(case)
    if labelled is None:
        return False
    counts, samples = expected(case, labelled)
    names = [str(n) for n in case.cube.data_vars if n != "filter_mask"]
    sampler = MultiProcSampler(
        labelled,
        nproc=1,
        sample_size=case.size or None,
        overlap=case.overlap or None,
        drop_nan=case.drop_nan,
        fill_method=case.fill_method,
        const=0.5 if case.fill_method == "constant" else None,
        scale_fn=case.scale_fn,
        to_pred=case.target,
        seed=case.seed,
        **{f"{part}_cube": folder / f"{part}.zarr" for part in PARTS},
    )
    try:
        stores = dict(zip(PARTS, sampler.get_datasets(), strict=True))
    except EmptyPartError:
        assert not all(counts[part] for part in PARTS)
        assert not list(folder.glob("*"))
        return False
    except ValueError as error:
        # a variable that train has no value of cannot be scaled or filled
        if "finite" in str(error) or "no value" in str(error):
            return False
        raise
    accounting = {k: n for k, n in sampler.plan().accounting.items() if n}
    assert accounting == {k: n for k, n in counts.items() if n}
    for part, store in stores.items():
        compare(case, store, samples[part], names)
    return True


def compare(case: Case, store: xr.Dataset, wanted: dict[Any, Any], names: list[str]) -> None:
    """Compare a store, and the batches of its loader, with the samples of the loop."""
    first = [store[f"{d}_index"].values for d in case.dims]
    origins = [tuple(int(i) for i in row) for row in zip(*first, strict=True)]
    assert len(origins) == len(set(origins))
    assert set(origins) == set(wanted)
    kept = [case.dims.index(d) for d in case.dims if case.size.get(d, 1) > 1]
    shape = [case.size[case.dims[axis]] for axis in kept]
    for name in names:
        right = np.stack([wanted[origin][name].reshape(shape) for origin in origins])
        stored = store[name].values.astype("f8")
        np.testing.assert_allclose(stored, right, rtol=1e-5, atol=2e-5)
    features = [name for name in names if name != case.target]
    if not case.target:
        return
    dataset = PTXrDataset(store, to_pred=case.target)
    at = 0
    for x, y in prep_dataloader(dataset, batch_size=5, shuffle=False, drop_last=False):
        rows = slice(at, at + len(x))
        stacked = np.stack([store[name].values[rows] for name in features], axis=1)
        np.testing.assert_array_equal(x.numpy(), stacked.astype("f4"))
        target = store[case.target].values[rows].astype("f4").reshape(y.shape)
        np.testing.assert_array_equal(y.numpy(), target)
        at += len(x)
    assert at == store.sizes["samples"]


def test_random_cases_agree_with_a_plain_loop(tmp_path):
    stored = sum(check(Case.draw(seed), tmp_path / str(seed)) for seed in range(60))
    assert stored > 20  # or the cases would test refusals only


@pytest.mark.soak
@pytest.mark.parametrize("start", range(1000, 3000, 100))
def test_many_random_cases_agree_with_a_plain_loop(tmp_path, start):
    for seed in range(start, start + 100):
        check(Case.draw(seed), tmp_path / str(seed))
