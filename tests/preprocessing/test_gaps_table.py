"""The table of gaps, row by row: each rule for dropping with each way of filling, 1-D to 5-D."""

from __future__ import annotations

import itertools
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr

from ml4cube import preprocessing as pp
from ml4cube.core.missing import DROP_POLICIES, FILL_METHODS
from tests import oracle
from tests.cubes import no_compute

SIZES = (12, 2, 3, 2, 2)
CONST = -5.0


def made_samples(ndim: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Twelve samples, some without gaps, some all gap; a mask, static beyond points; a label."""
    rng = np.random.default_rng(seed + ndim)
    shape = SIZES[:ndim]
    samples: dict[str, np.ndarray] = {}
    for name in "ab":
        share = rng.choice([0.0, 0.3, 1.0], shape[0], p=[0.4, 0.4, 0.2])
        lost = rng.random(shape) < share.reshape(-1, *(1,) * (ndim - 1))
        cells = rng.normal(280, 5, shape).astype("f4")
        samples[name] = np.where(lost, rng.choice([np.nan, np.inf], shape), cells).astype("f4")
    mask = rng.random(shape[1:] or shape) < 0.8
    mask.flat[0] = True
    samples["filter_mask"] = mask
    samples["split"] = (np.arange(12) % 3 > 0).astype("uint8")
    return samples


def as_dataset(samples: dict[str, np.ndarray]) -> xr.Dataset:
    """The same samples with names of dims."""
    dims = ("samples", "u", "v", "w", "x")[: samples["a"].ndim]
    mask_dims = dims if samples["filter_mask"].shape == samples["a"].shape else dims[1:]
    return xr.Dataset(
        {
            "a": (dims, samples["a"]),
            "b": (dims, samples["b"]),
            "filter_mask": (mask_dims, samples["filter_mask"]),
            "split": ("samples", samples["split"]),
        }
    )


def expected(samples: dict[str, np.ndarray], policy: str | None, method: str) -> dict[str, Any]:
    """Which samples stay, what they hold, and the counts: one sample and one cell at a time."""
    shape = samples["a"].shape
    mask = samples["filter_mask"]
    mask = mask if mask.shape == shape else np.broadcast_to(mask, shape)
    data = {name: samples[name] for name in "ab"}
    words = oracle.keep(data, mask, policy)
    kept = [i for i, word in enumerate(words) if word == "kept"]
    counts = {"total": 12, "kept": len(kept), "filled": 0}
    counts |= {word: words.count(word) for word in ("gap", "mask") if word in words}
    result: dict[str, Any] = {"kept": kept, "counts": counts}
    for name, cells in data.items():
        in_train = [i for i in range(12) if samples["split"][i] == 1]
        train = [float(x) for i in in_train for x in np.ravel(cells[i]) if not oracle.is_gap(x)]
        result[name] = [oracle.filled(cells[i], method, train, CONST) for i in kept]
        result[f"{name} range"] = (min(train), max(train))
        counts["filled"] += sum(oracle.is_gap(x) for i in kept for x in np.ravel(cells[i]))
    return result


def check(found: Any, wanted: dict[str, Any], method: str) -> None:
    """Compare data with what the oracle says."""
    for name in "ab":
        cells = np.asarray(found[name])
        assert cells.dtype == np.float32
        assert len(cells) == len(wanted["kept"])
        low, high = wanted[f"{name} range"]
        for here, there in zip(cells, wanted[name], strict=True):
            known = ~np.isnan(there)
            assert known.all() or method == "noise"
            np.testing.assert_allclose(here[known], there[known], rtol=1e-6)
            assert ((here[~known] >= low) & (here[~known] <= high)).all()
    np.testing.assert_array_equal(
        np.asarray(found["split"]), (np.arange(12) % 3 > 0).astype("uint8")[wanted["kept"]]
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", DROP_POLICIES)
@pytest.mark.parametrize("method", FILL_METHODS)
@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
def test_samples_are_dropped_then_filled_as_the_table_says(
    policy: str | None, method: str, ndim: int
) -> None:
    samples = made_samples(ndim)
    before = {name: values.copy() for name, values in samples.items()}
    wanted = expected(samples, policy, method)
    stats = pp.Statistics.from_cube(samples, ["a", "b"])

    def run(given: Any) -> Any:
        dropped = pp.drop_nan_values(given, ["a", "b"], policy)
        return pp.fill_nan_values(dropped, ["a", "b"], method, CONST, statistics=stats)

    plain = run(samples)
    check(plain, wanted, method)
    assert plain.accounting == wanted["counts"]
    ds = as_dataset(samples)
    small = dict.fromkeys(ds.a.dims, 1) if ndim < 4 else {"samples": 5, "u": 1}
    for chunks in (None, small):
        cube = ds.chunk(chunks) if chunks else ds
        result = run(cube)
        check(result.compute(), wanted, method)
        counts = pp.accounting(result)
        if policy is None:  # nothing was judged, so nothing is counted but what was filled
            assert counts == {"filled": wanted["counts"]["filled"]}
        else:
            assert counts == wanted["counts"]
        xr.testing.assert_identical(cube.compute(), as_dataset(before))
    for name, values in samples.items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.slow
@pytest.mark.parametrize("policy", [policy for policy in DROP_POLICIES if policy])
@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
def test_cells_of_a_cube_are_samples_of_their_own(policy: str, ndim: int) -> None:
    samples = made_samples(ndim, seed=9)
    dims = ("time", "u", "v", "w", "x")[:ndim]
    ds = as_dataset(samples).rename(samples="time")
    mask = np.broadcast_to(ds.filter_mask.values, ds.a.shape)
    flat = {name: ds[name].values.ravel() for name in "ab"}
    words = np.array(oracle.keep(flat, mask.ravel(), policy)).reshape(ds.a.shape)
    for chunks, order in itertools.product([None, {"time": 5}], [dims, dims[::-1]]):
        cube = ds.transpose(*order, missing_dims="ignore")
        cube = cube.chunk(chunks) if chunks else cube
        with dask.config.set(scheduler=no_compute):
            result = pp.drop_nan_values(cube, ["a", "b"], policy)
        for name in "ab":
            assert result[name].dims == cube[name].dims
            kept = np.where(words == "kept", ds[name].values, np.nan)
            np.testing.assert_array_equal(result[name].transpose(*dims), kept)
        counts = pp.accounting(result)
        assert counts["total"] == words.size
        assert counts["kept"] == (words == "kept").sum()
        assert counts.get("gap", 0) == (words == "gap").sum()
        assert counts.get("mask", 0) == (words == "mask").sum()


@pytest.mark.slow
@pytest.mark.parametrize("method", FILL_METHODS)
@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
def test_cells_of_a_cube_are_filled_lazily_and_alike_for_any_chunks(method: str, ndim: int) -> None:
    ds = as_dataset(made_samples(ndim, seed=3)).rename(samples="time")
    stats = pp.Statistics.from_cube(ds, ["a", "b"])
    expected = pp.fill_nan_values(ds, ["a", "b"], method, CONST, statistics=stats)

    for chunks in ({"time": 5}, {"time": 5, **dict.fromkeys(ds.a.dims[1:3], 1)}):
        cube = ds.transpose(*ds.a.dims[::-1], missing_dims="ignore").chunk(chunks)
        with dask.config.set(scheduler=no_compute):
            filled = pp.fill_nan_values(cube, ["a", "b"], method, CONST, statistics=stats)
        for name in "ab":
            assert filled[name].chunks == cube[name].chunks
            assert filled[name].attrs == {"ml4cube_filled": method}
            np.testing.assert_array_equal(filled[name].transpose(*ds.a.dims), expected[name])
            gaps = ~np.isfinite(ds[name].values)
            np.testing.assert_array_equal(expected[name].values[~gaps], ds[name].values[~gaps])
            assert np.isfinite(expected[name]).all()
            if method != "noise":
                value = CONST if method == "constant" else stats[name].mean
                assert (expected[name].values[gaps] == np.float32(value)).all()
        assert pp.accounting(filled) == pp.accounting(expected)


def test_filling_cells_that_were_dropped_or_masked_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = as_dataset(made_samples(2))
    for ds, warned in ((samples, False), (samples.rename(samples="time"), True)):
        caplog.clear()
        pp.fill_nan_values(ds, ["a"], "mean")
        assert "dropped" not in caplog.text
        dropped = pp.drop_nan_values(ds, ["a", "b"])
        pp.fill_nan_values(dropped, ["a"], "constant", CONST)
        assert ("drop_nan_values or apply_filter dropped" in caplog.text) == warned
    caplog.clear()
    outside = pp.assign_mask(xr.Dataset({"a": ("x", np.arange(6.0))}), np.arange(6) > 1)
    pp.fill_nan_values(outside, ["a"], "mean")
    assert not caplog.text
    pp.fill_nan_values(pp.apply_filter(outside), ["a"], "mean")
    assert "or apply_filter dropped are gaps" in caplog.text


KINDS = {
    "int16": np.arange(6, dtype="i2"),
    "bool": np.arange(6) % 2 == 0,
    "dates": np.arange(6).astype("M8[D]").astype("M8[ns]"),
    "big-endian": np.array([1, np.nan, 3, 4, 5, 6], ">f4"),
    "half": np.array([1, np.nan, 3, 4, 5, 6], "f2"),
    "constant": np.array([7.5, np.nan, 7.5, 7.5, 7.5, 7.5]),
    "all gap": np.full(6, np.nan, "f4"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lazy", [False, True])
def test_every_kind_of_variable_goes_all_the_way_or_is_refused_by_name(
    kind: str, lazy: bool
) -> None:
    ds = xr.Dataset({"odd": ("x", KINDS[kind]), "t": ("x", np.array([1.0, 2, np.nan, 4, 5, 6]))})
    cube = ds.chunk(x=4) if lazy else ds
    dropped = pp.drop_nan_values(cube)
    assert pp.accounting(dropped)["kept"] == 6 - len(
        {2} | {i for i, x in enumerate(KINDS[kind]) if x != x}
    )
    if kind == "all gap":
        assert np.isnan(pp.get_statistics(cube)["odd"]).all()
        for act in (
            lambda: pp.fill_nan_values(cube, ["odd"]).compute(),
            lambda: pp.CubeScaler().fit_transform(cube),
            lambda: pp.normalize(cube, pp.get_range(cube)),
        ):
            with pytest.raises(ValueError, match=r"'odd'.*gaps"):
                act()
        return
    filled = pp.fill_nan_values(cube)
    assert np.isfinite(filled.t).all()
    assert filled.odd.dtype == ds.odd.dtype
    if kind == "dates":
        assert "odd" not in pp.get_statistics(cube)
        xr.testing.assert_identical(filled.odd.compute().drop_vars(filled.odd.coords), ds.odd)
        return
    mean, std = pp.get_statistics(cube)["odd"]
    finite = KINDS[kind].astype("f8")[np.isfinite(KINDS[kind].astype("f8"))]
    assert (mean, std) == pytest.approx((finite.mean(), finite.std()))
    back = pp.CubeScaler().fit(filled)
    result = back.inverse_transform(back.transform(filled))
    np.testing.assert_allclose(result.odd, filled.odd.astype("f8"), rtol=2e-3, atol=1e-6)
