"""Scaling by statistics of other cells: of another store, per level, pixel or month."""

import collections
import functools
import json

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube.cube.reader import CubeReader
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.errors import CubeError, RunError, StoreExistsError
from ml4cube.postprocessing import undo_normalizing, undo_standardizing
from ml4cube.prediction.cube import predict_cube
from ml4cube.preprocessing import CubeScaler, Statistics
from ml4cube.splits import assign_block_split
from ml4cube.store.format import open_store
from ml4cube.store.metadata import StoreMetadata

SHAPE = {"time": 36, "level": 2, "lat": 4, "lon": 4}
FORMS = {
    "level": CubeScaler(per=("variable", "level")),
    "pixel": CubeScaler(per=("variable", "lat", "lon")),
    "month": CubeScaler(climatology="month"),
    "month and level": CubeScaler(per=("level",), climatology="month", method="normalize"),
    "robust": CubeScaler(per=("level",), method="robust"),
    "area": CubeScaler(weights="area"),
}


def made_cube(seed=0, calendar="standard", shift=0.0):
    """Every level, pixel and month has a mean of its own; a month a step."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=tuple(SHAPE.values())) + shift
    values += 100 * np.arange(2)[:, None, None] + 10 * np.arange(16).reshape(4, 4)
    values += 1000 * (np.arange(36) % 12)[:, None, None, None]
    dates = xr.date_range("2000-01-01", periods=36, freq="MS", calendar=calendar)
    coords = {
        "time": dates,
        "level": [500, 850],
        "lat": [-60.0, -20, 20, 60],
        "lon": np.arange(4.0),
    }
    return xr.Dataset(
        {
            "t": (tuple(SHAPE), values),
            "u": (("lat", "lon"), values[0, 0]),
            "n": (tuple(SHAPE), np.arange(values.size).reshape(values.shape)),
        },
        coords,
    )


def labelled(cube):
    return assign_block_split(cube, {"time": 12}, 0.67, seed=1)


def by_loop(cube, form):
    """The cube scaled by hand: each value by those of its level, pixel or month in train."""
    t, train = cube["t"], cube["split"].broadcast_like(cube["t"]) == 1
    known, result = t.where(train).values, t.copy(deep=True)
    months = t["time"].dt.month.values
    for i, k, y, x in np.ndindex(*t.shape):
        cells = known[months == months[i]] if form.startswith("month") else known
        if form in ("level", "month and level", "robust"):
            cells = cells[:, k]
        elif form == "pixel":
            cells = cells[:, :, y, x]
        offset, scale = np.nanmean(cells), np.nanstd(cells)
        if form == "area":
            areas = np.cos(np.radians(t.lat.values))[:, None] * np.isfinite(cells)
            offset = np.nansum(areas * cells) / areas.sum()
            scale = np.sqrt(np.nansum(areas * (cells - offset) ** 2) / areas.sum())
        elif form == "month and level":
            offset, scale = np.nanmin(cells), np.nanmax(cells) - np.nanmin(cells)
        elif form == "robust":
            low, offset, high = np.nanquantile(cells, [0.25, 0.5, 0.75], method="inverted_cdf")
            scale = high - low
        result[i, k, y, x] = (t.values[i, k, y, x] - offset) / scale
    return cube.assign(t=result)


def sampled(cube, folder, name, **arguments):
    paths = {part: str(folder / f"{name}_{part}.zarr") for part in ("train_cube", "test_cube")}
    return MultiProcSampler(cube, nproc=1, **paths, **arguments), paths


CUTS = {
    "over months": {"sample_size": {"time": 3, "lat": 2, "lon": 2}, "overlap": 0.5},
    "over levels": {"sample_size": {"level": 2, "lat": 4}, "array_dims": ["samples", "z", "y"]},
    "points": {},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "cut"),
    [
        ("level", "over levels"), ("level", "points"), ("pixel", "over months"),
        ("month", "over months"), ("month and level", "over levels"), ("robust", "points"),
        ("area", "points"),
    ],
)  # fmt: skip
def test_each_value_is_scaled_by_the_numbers_of_its_place(tmp_path, form, cut):
    cube = labelled(made_cube(calendar="noleap" if form == "month" else "standard"))
    cut = CUTS[cut]
    if "array_dims" in cut:
        cube = cube.drop_vars("u")
    scaler = FORMS[form].fit(cube)
    stores = sampled(cube, tmp_path, "own", statistics=scaler, **cut)[0].get_datasets()
    wanted = by_loop(cube, form)
    if "u" in cube:
        wanted["u"] = scaler.transform(cube)["u"]
    byhand = sampled(wanted, tmp_path, "hand", scale_fn=None, **cut)[0].get_datasets()
    raw = sampled(cube, tmp_path, "raw", scale_fn=None, **cut)[0].get_datasets()
    for store, hand, plain in zip(stores, byhand, raw, strict=True):
        for name in cube.data_vars.keys() & {"t", "u", "n"}:
            tolerance = 0.02 if form == "robust" else 1e-9  # quartiles of a histogram
            np.testing.assert_allclose(store[name], hand[name], tolerance, tolerance)
        # and back, from the store alone
        metadata = StoreMetadata.of(store)
        again = StoreMetadata.of(xr.Dataset(attrs=json.loads(json.dumps(metadata.to_attrs()))))
        assert again.statistics == metadata.statistics
        data = PTXrDataset(store, dtype="float64")
        back = data.to_dataset(data.take(np.arange(len(data))), np.arange(len(data)), unscale=True)
        np.testing.assert_allclose(back["t"], plain["t"], 1e-9, 1e-9)
        np.testing.assert_array_equal(back["n"], plain["n"])
        if form != "robust":
            undo = undo_normalizing if scaler.method == "normalize" else undo_standardizing
            np.testing.assert_allclose(undo(store, metadata.statistics)["t"], plain["t"], 1e-9)
            lazy = undo(store["t"].chunk(samples=5), metadata.statistics)
            np.testing.assert_allclose(lazy, plain["t"], 1e-9)
    # the same when it is cut as it is read
    for part, store in zip(("train", "test"), stores, strict=True):
        if "array_dims" in cut:
            continue
        found = []
        for given, more in ((cube, {"part": part, "statistics": scaler, **cut}), (store, {})):
            data = PTXrDataset(given, features="t", dtype="float64", **more)
            at = data.coords(np.arange(len(data)))
            found.append(data.take(np.lexsort([at[f"{dim}_index"] for dim in SHAPE])).numpy())
        np.testing.assert_allclose(*found, 1e-12)


@pytest.mark.parametrize("form", ["level", "pixel", "month", "month and level", "robust"])
def test_a_cube_is_predicted_with_the_scaling_of_each_place(tmp_path, form):
    cube = labelled(made_cube()[["t"]])
    sampler, paths = sampled(
        cube,
        tmp_path,
        "s",
        statistics=FORMS[form].fit(cube),
        sample_size={"time": 2, "lat": 3, "lon": 3},
        overlap={"lat": 0.5},
    )
    sampler.run()
    other = made_cube(seed=5, shift=7)[["t"]].isel(level=[1], lat=[1, 2, 3], time=slice(5, 20))
    seen = []

    def model(x):
        seen.append(x.double())
        return x

    back = predict_cube(model, other, paths["train_cube"])
    np.testing.assert_allclose(back["t"], other["t"], 1e-4)
    scaled = FORMS[form].transform(other)["t"]
    assert float(torch.cat(seen).min()) == pytest.approx(float(scaled.min()), rel=1e-5)
    assert float(torch.cat(seen).max()) == pytest.approx(float(scaled.max()), rel=1e-5)
    xr.testing.assert_allclose(predict_cube(lambda x: x, other, FORMS[form])["t"], other["t"], 1e-4)


def test_targets_at_a_lead_time_are_scaled_by_the_month_they_are_in():
    cube = labelled(made_cube()[["t"]])
    scaler = CubeScaler(climatology="month").fit(cube)
    data = PTXrDataset(
        cube,
        to_pred="t",
        sample_size={"lat": 4, "lon": 4},
        target_offset={"time": 1},
        statistics=scaler,
        dtype="float64",
    )
    scaled = scaler.transform(cube)["t"]
    rows = np.arange(len(data))
    x, y = data.take(rows)
    at = data.coords(rows)
    for row in rows:
        i, k = at["time_index"][row], at["level_index"][row]
        np.testing.assert_allclose(x[row, 0], scaled[i, k], 1e-12)
        np.testing.assert_allclose(y[row, 0], scaled[i + 1, k], 1e-12)
    back = data.to_dataset((x, y), rows, unscale=True)
    later = cube["t"].values[at["time_index"] + 1, at["level_index"]]
    np.testing.assert_allclose(back["t_target"], later)


@pytest.mark.slow
def test_stores_that_share_their_scaling_keep_what_differs_between_cubes(tmp_path):
    cold, warm = labelled(made_cube()[["t"]]), labelled(made_cube(shift=100.0)[["t"]])
    first, paths = sampled(cold, tmp_path, "cold", scale_fn="normalize")
    train = first.get_datasets()[0]
    for given in (paths["train_cube"], train, PTXrDataset(train), StoreMetadata.of(train)):
        again, _ = sampled(warm, tmp_path, "warm", statistics=given, overwrite=True)
        store = again.get_datasets()[0]
        assert StoreMetadata.of(store).statistics == StoreMetadata.of(train).statistics
        assert StoreMetadata.of(store).recipe.scale_fn == "normalize"
        span = StoreMetadata.of(train).statistics["t"]
        np.testing.assert_allclose(store.t - train.t, 100 / (span.max - span.min), 1e-9)
    with pytest.raises(StoreExistsError, match="another call"):
        sampled(warm, tmp_path, "warm")[0].run()
    with pytest.raises(StoreExistsError, match="another call"):
        sampled(warm, tmp_path, "warm", statistics=Statistics.from_cube(warm))[0].run()
    assert sampled(warm, tmp_path, "warm", statistics=paths["train_cube"])[0].run() is None


def test_statistics_that_do_not_fit_are_refused_by_name(tmp_path):
    cube = labelled(made_cube()[["t", "u"]])
    per_level = CubeScaler(per=("level",)).fit(cube)
    unscaled, paths = sampled(cube, tmp_path, "unscaled", scale_fn=None)
    unscaled.run()
    for statistics, more, words in [
        (CubeScaler().fit(cube[["t", "split"]]), {}, r"also have \['u'\]"),
        (CubeScaler(per=("level",)).fit(cube.isel(level=[0])), {}, r"'t' at level \[850\]"),
        (
            CubeScaler(climatology="month").fit(made_cube().isel(time=slice(6))),
            {},
            "of month",
        ),
        (CubeScaler(climatology="month").fit(cube), {"drop": "time"}, "needs one dim with dates"),
        (CubeScaler(), {}, "not fitted"),
        ({"t": [0, 1]}, {}, "statistics must be .*dict"),
        (3, {}, "statistics|store"),
        (per_level, {"scale_fn": None}, "but scale_fn=None asks for no scaling"),
        (per_level, {"scale_fn": "normalize"}, "scale_fn='normalize', but"),
        (paths["train_cube"], {}, "not scaled"),
        (str(tmp_path / "none.zarr"), {}, "none.zarr"),
        (Statistics.from_cube(cube), {"scale_fn": "robust"}, "scale_fn"),
    ]:
        given = cube.drop_vars(more["drop"]) if "drop" in more else cube
        arguments = {k: v for k, v in more.items() if k != "drop"}
        with pytest.raises((CubeError, RunError), match=words):
            sampled(given, tmp_path, "x", statistics=statistics, **arguments)
        with pytest.raises((CubeError, RunError), match=words):
            PTXrDataset(given, statistics=statistics, **arguments)


@pytest.mark.parametrize("per", [("lat", "lon"), ("lat",)])
def test_a_value_without_statistics_is_refused_and_does_not_become_a_gap(tmp_path, per):
    cube = labelled(made_cube()[["t"]])
    holes = cube.assign(t=cube.t.where((cube.lat < 50) | (cube.split != 1)))
    scaler = CubeScaler(per=per).fit(holes)
    sampler, _ = sampled(holes, tmp_path, "x", statistics=scaler)
    with pytest.raises(CubeError, match=r"'t' has values without statistics .* lat 3"):
        sampler.run()
    land = cube.assign(t=cube.t.where(cube.lat < 50))
    assert all(
        np.isfinite(s.t).all()
        for s in sampled(land, tmp_path, "y", statistics=scaler)[0].get_datasets()
    )


def test_windows_of_a_callbacks_own_are_matched_only_where_they_can_be(tmp_path):
    cube = labelled(made_cube()[["t"]])
    means = lambda samples: {"t": samples["t"].mean(axis=(1, 2), keepdims=True)[:, :, 0]}  # noqa: E731
    cut = {"sample_size": {"lat": 4, "lon": 4}, "callback": means}
    levels = CubeScaler(per=("level",)).fit(cube)
    store = sampled(cube, tmp_path, "x", statistics=levels, **cut)[0].get_datasets()[0]
    np.testing.assert_allclose(
        store.t[:, 0],
        levels.transform(cube).t.mean(["lat", "lon"]).values[store.time_index, store.level_index],
        1e-9,
    )
    with pytest.raises(CubeError, match=r"windows of 't' to \(1,\)"):
        sampled(cube, tmp_path, "y", statistics=CubeScaler(per=("lat",)).fit(cube), **cut)[0].run()


def test_selected_samples_are_not_undone_at_the_wrong_place(tmp_path):
    cube = labelled(made_cube()[["t"]])
    sampler, paths = sampled(
        cube,
        tmp_path,
        "x",
        statistics=CubeScaler(per=("lat",)).fit(cube),
        sample_size={"lat": 4, "lon": 4},
    )
    sampler.run()
    store = open_store(paths["train_cube"])
    statistics = StoreMetadata.of(store).statistics
    few = undo_standardizing(store.isel(samples=[3, 1]), statistics)
    xr.testing.assert_allclose(few, undo_standardizing(store, statistics).isel(samples=[3, 1]))
    for wrong in (store.isel(lat=[2, 3]), store.isel(lat=1), store.drop_vars("lat_index")):
        with pytest.raises(
            CubeError, match="origins of the samples of 't' along 'lat' are unknown"
        ):
            undo_standardizing(wrong, statistics)
    with pytest.raises(CubeError, match="use those of the store"):
        undo_standardizing(store, CubeScaler(per=("level", "lat")).fit(cube).statistics_)


def data_of(shift, **arguments):
    cube = labelled(made_cube(shift=shift)[["t", "u"]])
    return PTXrDataset(cube, to_pred="t", features="u", **arguments)


def train_on(train, test_data=None):
    from ml4cube.training.pytorch import Trainer

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    return Trainer(model, train, test_data, optimizer, loss=torch.nn.MSELoss(), epochs=1)


def test_data_scaled_differently_are_not_joined():
    mine, other = data_of(0.0), data_of(100.0)
    raw, joined = data_of(0.0, scale_fn=None), data_of(100.0, statistics=data_of(0.0))
    means = [one.statistics["u"].mean for one in (mine, other)]
    words = rf"'u' is scaled differently .* mean {means[0]:.6g} and std .*{means[1]:.6g} and std"
    concat, subset = torch.utils.data.ConcatDataset, torch.utils.data.Subset
    plain = torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1))
    loader = functools.partial(torch.utils.data.DataLoader, batch_size=4)
    # in one loader
    many = concat([mine] * 64 + [other])
    for wrong in (concat([mine, other]), concat([mine, subset(other, [1, 2])]), many):
        with pytest.raises(CubeError, match=words):
            prep_dataloader(wrong)
        with pytest.raises(CubeError, match=words):
            train_on(loader(wrong))
    # in several loaders of one call, or of one trainer
    with pytest.raises(CubeError, match=r"in train_ds, .* in val_ds"):
        prep_dataloader(mine, val_ds=other)
    with pytest.raises(CubeError, match="not at all in test_ds"):
        prep_dataloader(mine, raw)
    with pytest.raises(CubeError, match=words):
        train_on(prep_dataloader(mine), test_data=prep_dataloader(test_ds=other))
    sets = {"south": prep_dataloader(test_ds=mine), "north": loader(other)}
    with pytest.raises(CubeError, match=r"in train_data, .* in test_data\['north'\]"):
        train_on(prep_dataloader(mine), test_data=sets)
    by_month = data_of(0.0, statistics=CubeScaler(climatology="month").fit(made_cube()))
    with pytest.raises(CubeError, match=r"mean .* to .* and std .* along time"):
        prep_dataloader(mine, by_month)
    # alike, or not known
    prep_dataloader(concat([mine, joined]), test_ds=mine, val_ds=plain)
    prep_dataloader(by_month, data_of(9.0, statistics=by_month))
    train_on(
        loader(concat([mine, joined, plain])), test_data={"a": loader(mine), "b": loader(plain)}
    )


@pytest.fixture
def reads(monkeypatch):
    """Cells read of every variable but the label, as they are."""
    found = collections.Counter()
    read = CubeReader.read

    def noted(self, slices):
        cells = int(np.prod([s.stop - s.start for s in slices.values()]))
        found.update({name: cells for name in self.sources if name != "split"})
        return read(self, slices)

    monkeypatch.setattr(CubeReader, "read", noted)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale_fn": None, "drop_nan": None},
        {"scale_fn": None, "drop_nan": None, "target_offset": {"time": 1}, "to_pred": "t"},
        {"statistics": CubeScaler(per=("level",)), "drop_nan": None, "to_pred": "t"},
        {"statistics": CubeScaler(), "drop_nan": None, "fill_method": "constant", "const": 0.0},
    ],
    ids=["unscaled", "lead", "scaled", "filled"],
)
def test_a_cube_that_decides_nothing_is_not_read_before_its_samples(reads, arguments, capsys):
    cube = labelled(made_cube(seed=3))
    if "statistics" in arguments:
        arguments = arguments | {"statistics": arguments["statistics"].fit(cube)}
    cut = {"sample_size": {"lat": 2, "lon": 2}, "overlap": 0.5, "progress": True}
    reads.clear()  # those of the label and of the scaler
    parts = {part: PTXrDataset(cube, part=part, **cut, **arguments) for part in ("train", "test")}
    assert not reads
    assert "counting" not in capsys.readouterr().err
    # the same samples as where gaps are looked for, of which there are none
    strict = {k: v for k, v in arguments.items() if k not in ("drop_nan", "fill_method", "const")}
    for part, data in parts.items():
        eager = PTXrDataset(cube, part=part, **cut, **strict)
        assert len(data) == len(eager) > 0
        rows = np.arange(len(data))
        for a, b in zip(data.unpack(data.take(rows)), eager.unpack(eager.take(rows)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_first_samples_read_no_variable_that_nobody_asked_for(reads):
    cube = labelled(made_cube())
    reads.clear()
    PTXrDataset(cube, features="u", scale_fn=None, drop_nan=None)[0]
    assert set(reads) == {"u"}
    reads.clear()
    # whole numbers have no gaps, and nothing but them would be dropped
    PTXrDataset(cube[["n", "split"]], scale_fn=None)
    assert not reads
    scaler = CubeScaler().fit(cube)
    reads.clear()
    PTXrDataset(cube, statistics=scaler)
    assert set(reads) == {"t", "u"}


@pytest.mark.parametrize("kind", ["memory", "path", "opened", "dask"])
def test_a_cube_is_read_once_for_all_its_parts(tmp_path, reads, kind, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    cube = labelled(made_cube(seed=4)[["t", "n"]])
    cube.drop_encoding().to_zarr(tmp_path / "c.zarr", zarr_format=3)
    options = {"path": {}, "opened": {"chunks": None}, "dask": {}}
    given = {"memory": cube, "path": str(tmp_path / "c.zarr")}.get(kind)
    if given is None:
        given = xr.open_zarr(tmp_path / "c.zarr", **options[kind])
    cut = {"sample_size": {"lat": 4, "lon": 4}, "progress": True}
    reads.clear()
    first = PTXrDataset(given, part="train", **cut)
    assert reads == {"t": cube.t.size, "n": cube.t.size}
    assert "counting" in capsys.readouterr().err
    second = PTXrDataset(given, part="test", **cut)
    third = PTXrDataset(given, part="train", to_pred="t", **cut)
    assert reads == {"t": cube.t.size, "n": cube.t.size}
    assert first.statistics == second.statistics == third.statistics
    assert len(first) + len(second) == SHAPE["time"] * SHAPE["level"]
    # another call, or a cube that has changed
    PTXrDataset(given, part="train", drop_nan="if_all_nan", **cut)
    assert reads["t"] == 2 * cube.t.size
    if kind == "memory":
        cube["t"].values[0] += 5
        assert PTXrDataset(cube, part="train", **cut).statistics != first.statistics


def test_masks_and_gaps_are_looked_for_and_their_counts_are_right(reads):
    cube = labelled(made_cube()[["t", "n"]])
    cube["filter_mask"] = cube.lat > -50
    holes = cube.assign(t=cube.t.where(cube.n % 7 > 0))
    scaler = CubeScaler().fit(cube)
    reads.clear()
    data = PTXrDataset(holes, statistics=scaler)
    assert set(reads) == {"t", "filter_mask"}
    good = (holes.n % 7 > 0) & holes.filter_mask & (holes.split == 1)
    assert len(data) == int(good.sum()) == data.metadata.accounting["train"]
    empty = cube.assign(t=cube.t.where(cube.split == 1))
    assert len(PTXrDataset(empty, statistics=scaler)) > 0
    with pytest.raises(CubeError, match="the test part would hold no sample"):
        PTXrDataset(empty, part="test", statistics=scaler)
