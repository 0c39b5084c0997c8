"""What objects print: every public class has a text, and its HTML is well-formed and escaped."""

import copy
import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree

import dask
import iris_sample_data
import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import SGDRegressor
from torch import nn
from torch.utils.data import TensorDataset

from ml4cube import CubeScaler, MultiProcSampler, Statistics, XrDataset, splits
from ml4cube.core.display import PrintedAsCall, Summarized, Summary, Table, bytes_text, shown
from ml4cube.core.split_plan import SplitPlan
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.datasets.pytorch import Flip, PTXrDataset, prep_dataloader
from ml4cube.datasets.store import StoreMetadata, open_store
from ml4cube.errors import InvalidTypeError
from ml4cube.evaluation import evaluate
from ml4cube.prediction import predict_cube
from ml4cube.splits.label import read_recipe
from ml4cube.training import distributed, pytorch, pytorch_distributed, sklearn, trainer
from ml4cube.training.addons import AddOnBase
from ml4cube.training.callbacks import EarlyStopping
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.schedulers import CosineAnnealingScheduler
from ml4cube.training.state import History
from tests.cubes import no_compute
from tests.samplestores import paths, write_store

API = (Path(__file__).parent.parent / "docs/reference/api.md").read_text()


def public_classes() -> list[type]:
    """All classes that docs/reference/api.md publishes, with the classes that its modules list."""
    found = {}
    entry = r"\.\. auto(module|class):: (ml4cube[\w.]*)(\n   :imported-members:)?"
    for kind, name, imported in re.findall(entry, API):
        if kind == "class":
            module, _, attribute = name.rpartition(".")
            found[name] = getattr(importlib.import_module(module), attribute)
            continue
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", vars(module)):
            one = getattr(module, attribute)
            if not inspect.isclass(one) or not one.__module__.startswith("ml4cube"):
                continue
            if imported or hasattr(module, "__all__") or one.__module__ == name:
                found[f"{one.__module__}.{one.__qualname__}"] = one
    return [one for name, one in found.items() if not one.__name__.startswith("_")]


CLASSES = public_classes()


def is_printed(cls: type) -> bool:
    """Whether there are objects of a class that somebody prints."""
    return not issubclass(cls, BaseException | AddOnBase) and Protocol not in cls.__bases__


@pytest.mark.parametrize("cls", [*filter(is_printed, CLASSES)], ids=lambda c: c.__qualname__)
def test_no_public_class_prints_its_address(cls):
    assert cls.__repr__ is not object.__repr__


def test_the_public_classes_are_found():
    assert len(CLASSES) > 70
    assert {pytorch.Trainer, trainer.Trainer, MultiProcSampler, Statistics} <= set(CLASSES)


def is_concrete(cls: type) -> bool:
    return issubclass(cls, Summarized) and not inspect.isabstract(cls)


@pytest.mark.parametrize("cls", [*filter(is_concrete, CLASSES)], ids=lambda c: c.__qualname__)
def test_half_built_objects_print(cls):
    """As a debugger shows them after their constructor failed."""
    half_built = cls.__new__(cls)
    assert cls.__name__ in repr(half_built)
    ElementTree.fromstring(half_built._repr_html_())


# ------------------------------------------------------------------------------ objects


NAME = '<b>"t"&'


def cube(name: str = NAME) -> xr.Dataset:
    rng = np.random.default_rng(0)
    sizes = {"time": 24, "lat": 6, "lon": 8}
    attrs = {"units": "<i>K</i>"}
    values = {
        n: (tuple(sizes), rng.normal(280, 5, tuple(sizes.values())), attrs) for n in (name, "a")
    }
    time = xr.date_range("2000-01-01", periods=24, freq="MS")
    ds = xr.Dataset(values, {"time": time, "lat": np.linspace(-50, 50, 6)})
    return splits.assign_block_split(ds, {"time": 4}, 0.5, val=0.25)


def sampler(folder: Path, ds: xr.Dataset, **options) -> MultiProcSampler:
    options = {"sample_size": {"lat": 3, "lon": 4}, "overlap": {"lon": 0.5}, **options}
    return MultiProcSampler(
        ds, to_pred=NAME, nproc=1, progress=False, **paths(folder, val=True), **options
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.linspace(0, 1, 16).reshape(4, 4, 1)
    return [(part, 2 * part) for part in x]


def a_trainer(cls=pytorch.Trainer, val=..., **options) -> pytorch.Trainer:
    model = nn.Linear(1, 1)
    model.bias.requires_grad = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss": nn.MSELoss(), "epochs": 3, "progress": False, **options}
    return cls(model, batches(), batches() if val is ... else val, optimizer, **options)


def trainers(folder: Path) -> dict[str, object]:
    made = {
        "new trainer": a_trainer(best_model_path=folder / "<best>.pt"),
        "trained": a_trainer(val={"<b>north": batches(), "south": batches()}),
        "ranks": a_trainer(pytorch_distributed.Trainer, val=None),
    }
    made["trained"].train()
    model = made["ranks"].model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"optimizer": optimizer, "progress": False}
    made["steps"] = trainer.Trainer(model, loss=nn.MSELoss(), **arguments)
    made["stepped"] = trainer.Trainer(model, loss=nn.MSELoss(), mode="max", **arguments)
    made["stepped"].run(2, batches(), batches())
    made["tests"] = trainer.Trainer(model, loss=nn.MSELoss(), mode="test", progress=False)
    made["new fit"] = trainer.AdvancedTrainer(model, optimizer, nn.MSELoss(), progress=False)
    made["fitted"] = trainer.AdvancedTrainer(model, optimizer, nn.MSELoss(), progress=False)
    made["fitted"].fit(batches(), batches(), 2)
    arrays = [(np.ones((4, 1)), np.ones(4))]
    made["sklearn"] = sklearn.Trainer(SGDRegressor(), arrays, epochs=2, progress=False)
    made["sklearn trained"] = copy.deepcopy(made["sklearn"])
    made["sklearn trained"].train()
    made["gpus"] = distributed.MultiGPUTrainer(nn.Linear(1, 1))
    made["wrapped"] = distributed.DistributedTrainer(nn.Linear(1, 1))
    made["accumulator"] = distributed.GradientAccumulator(model, optimizer)
    made["history"], made["no history"] = made["trained"].history, History()
    made["scheduler"] = CosineAnnealingScheduler(optimizer, 10)
    made["stopping"], made["loss"] = EarlyStopping(3), MaskedLoss(nn.functional.mse_loss)
    return made


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> dict[str, object]:
    """Objects of all kinds, at several stages."""
    folder, ds = tmp_path_factory.mktemp("display"), cube()
    made = {"sampler": sampler(folder, ds)}
    made["planned"] = sampler(folder, ds)
    made["plan"] = made["planned"].plan()
    made["written"] = sampler(folder, ds)
    made["run"] = made["written"].run()
    made["store"] = StoreMetadata.of(folder / "train.zarr")
    made["arrays"] = XrDataset(ds, to_pred=NAME, sample_size={"lat": 3})
    made["data"] = data = PTXrDataset(folder / "train.zarr", to_pred=NAME)
    made["cut"] = PTXrDataset(ds, NAME, target_offset={"time": 1}, coord_features="lat")
    made["dict"] = PTXrDataset(ds, scale_fn=None)
    made["by hand"] = PTXrDataset(xr.Dataset({NAME: ("samples", np.ones(9))}))
    made["loader"] = prep_dataloader(data, batch_size=4, augment=Flip("lat"))
    made["val"] = prep_dataloader(val_ds=made["cut"], batch_size=4)
    many = PTXrDataset(write_store(folder / "many.zarr", 400), features="a")
    made["ring"] = prep_dataloader(many, batch_size=4, buffer_mb=0.005)
    made["map"] = prep_dataloader(TensorDataset(torch.zeros(10, 2)), batch_size=4)
    made["map sampler"], made["mixing"] = made["map"].sampler, made["loader"].shuffle_report()
    made["statistics"] = Statistics.from_cube(ds)
    made["monthly"] = Statistics.from_cube(ds, by="month", dims=["time", "lon"])
    made["scaler"], made["fitted scaler"] = CubeScaler("robust"), CubeScaler().fit(ds)
    made["split"] = read_recipe(ds["split"].attrs[RECIPE_ATTR])[0]
    made["folds"] = splits.BlockKFold(3, {"time": 4}, cube=ds)
    made["leakage"] = splits.leakage_report(ds)
    truth = xr.DataArray(np.arange(40.0), {"time": np.arange(40)}, ["time"], NAME)
    flat = xr.full_like(truth, 19.5)
    made["scores"] = evaluate(truth - 1, truth, baselines={"<flat>": flat})
    return made | trainers(folder)


def text_of(html: str) -> str:
    return " ".join("".join(ElementTree.fromstring(html).itertext()).split())


def test_objects_print_what_they_are(objects):
    for stage, one in objects.items():
        text = repr(one)
        assert str(one) == text
        assert not re.search(r" at 0x|not complete", text), (stage, text)
        assert len(text.splitlines()) <= 20, (stage, text)
        assert max(map(len, text.splitlines())) <= 100 or "/" in text, (stage, text)


def test_html_is_well_formed_and_escaped(objects):
    for stage, one in objects.items():
        html = one._repr_html_()
        text = text_of(html)  # fails where the HTML is not well-formed
        assert "not complete" not in text, stage
        assert type(one).__name__ in text
        assert not re.search(r"<b>\"t|<b>north|<flat>|<best>|<i>", html), stage
        assert not re.search(r"(src|href|http|script)", html), stage  # it loads nothing
    for stage in ("sampler", "plan", "store", "data", "statistics", "scores"):
        assert NAME in text_of(objects[stage]._repr_html_()), stage
    assert "<best>.pt" in text_of(objects["new trainer"]._repr_html_())


def test_sections_can_be_opened(objects):
    tree = ElementTree.fromstring(objects["trained"]._repr_html_())
    (history,) = tree.findall("details")
    assert "open" not in history.attrib
    inner = history.find("details")
    assert inner.findtext("summary") == "Epochs"
    assert len(inner.findall(".//tr")) == 1 + 3


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("sampler", ["time: 24, lat: 6, lon: 8", "lon: 4 (overlap 2)", f"{NAME} (<i>K</i>)"]),
        ("sampler", ["192 windows; plan()", "a gap are dropped", "standardize", "train 50%"]),
        ("planned", ["samples; run() writes"]),
        ("written", ["written; get_datasets()", "train.zarr", "val.zarr"]),
        ("plan", ["train samples", "dropped: edge", "kB", "3 × 4 float64"]),
        ("run", ["shards, ", "samples/s", "on disk", "train samples"]),
        ("data", ["72 train samples", "X: channels: 1, lat: 3, lon: 4, float32", "train.zarr"]),
        ("cut", ["time: y begins 1 after X", "channels: 4", "Coordinates: lat"]),
        ("loader", ["18 batches of 4 samples", "shuffled, seed 42", "all samples", "Flip(dims"]),
        ("ring", ["chunks mixed at a time"]),
        ("val", ["validation or test", "that of the data"]),
        ("map", ["2 batches", "8 of 10", "TensorDataset"]),
        ("statistics", ["2 variables of the train part", "576", "mean", "gaps"]),
        ("monthly", ["month × lat", " to "]),
        ("split", ["6 blocks", "train 3 50.0% 50.0%", "time: 4"]),
        ("scaler", ["not fitted; call fit", "method 'robust'"]),
        ("fitted scaler", ["fitted", "Statistics: 2 variables"]),
        ("leakage", ["touching cells", "status", "meaning"]),
        ("scores", ["40 dates", "<flat>", "RMSE", "is better than <flat>"]),
        ("new trainer", ["0 of 3 epochs", "train()", "2 parameters, 1 of them trained", "SGD"]),
        ("new trainer", ["list of 4 batches", "cpu, fp32", "MSELoss()"]),
        ("trained", ["3 of 3 epochs; best val_loss", "predict_cube", "<b>north: list of 4"]),
        ("ranks", ["dist_train(trainer)"]),
        ("stepped", ["2 epochs; best val_loss", "apply_weights()"]),
        ("tests", ["which tests"]),
        ("new fit", ["0 epochs", "fit(train_loader"]),
        ("fitted", ["2 epochs; best val_loss", "History"]),
        ("sklearn", ["0 of 2 epochs", "SGDRegressor()", "train()"]),
        ("sklearn trained", ["2 of 2 epochs; best train_loss", "evaluate(data)"]),
        ("history", ["3 epochs; least val_loss", "train_loss", "seconds"]),
        ("no history", ["0 epochs"]),
    ],
)
def test_what_a_person_wants_to_know(objects, stage, words):
    text = text_of(re.sub(r"</(td|th|b|summary)>", r" </\1>", objects[stage]._repr_html_()))
    text = re.sub(r"(X|Coordinates) (?=channels|lat)", r"\1: ", text)
    assert [one for one in words if one not in text] == [], text


def test_calls_are_printed_in_one_line(objects):
    assert repr(objects["stopping"]) == "EarlyStopping(patience=3)"
    assert repr(objects["scaler"]) == "CubeScaler(method='robust')"
    assert repr(objects["loss"]) == "MaskedLoss(loss=<mse_loss>)"
    assert repr(objects["accumulator"]) == (
        "GradientAccumulator(model=Linear(in_features=1, out_features=1, bias=True), "
        "optimizer=<SGD>)"
    )
    assert repr(objects["scheduler"]).startswith("CosineAnnealingScheduler(optimizer=<SGD>, total_")


def test_printing_reads_nothing(tmp_path):
    ds = cube().chunk({"time": 4})
    with dask.config.set(scheduler=no_compute):
        lazy = sampler(tmp_path, ds)
        assert "192 windows" in repr(lazy)
        assert "192 windows" in lazy._repr_html_()
    sampler(tmp_path, cube()).run()
    data = PTXrDataset(tmp_path / "train.zarr", to_pred=NAME)
    loader = prep_dataloader(data, batch_size=4)
    before = [(repr(one), one._repr_html_()) for one in (data, loader)]
    shutil.rmtree(tmp_path)
    assert [(repr(one), one._repr_html_()) for one in (data, loader)] == before
    assert "not complete" not in str(before)


def test_statistics_of_real_data():
    ds = xr.open_dataset(Path(iris_sample_data.path) / "ostia_monthly.nc")
    text = repr(Statistics.from_cube(ds[["surface_temperature"]]))
    assert re.search(r"surface_temperature  [\d,]{7,}  300\.8", text), text


@pytest.mark.parametrize(
    ("call", "got"),
    [
        (lambda made: open_store(made["sampler"]), "Icechunk session, got <MultiProcSampler>"),
        (lambda made: a_trainer(val=made["sampler"]), "batches, got <MultiProcSampler>;"),
        (lambda made: a_trainer(callbacks=made["data"]), "of Callback, got <PTXrDataset>"),
        (lambda made: predict_cube(made["trained"], cube(), made["store"]), "got <Trainer>"),
    ],
)
def test_errors_name_an_object_of_the_wrong_kind_in_one_line(objects, call, got):
    with pytest.raises(InvalidTypeError, match=got) as error:
        call(objects)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------- rendering


class Example(Summarized):
    def __init__(self, summary: Summary) -> None:
        self.summary = summary

    def _summary(self) -> Summary:
        return self.summary


def test_text_is_aligned_and_cut():
    table = Table(("name", "n"), [(f"v{k}", 10.0**k) for k in range(30)])
    inner = Example(Summary("an inner one"))
    empty = {"Empty": Table(("a",), []), "None": None}
    facts = {"Cube": {"lat": 4, "time": 1200}, "Names": [*"abcdefghijklmn"], "No": None, "Nor": ""}
    summary = Summary("a headline", facts, {"Table": table, "Inner": inner, **empty})
    assert repr(Example(summary)) == (
        "<Example> a headline\n"
        "Cube:  lat: 4, time: 1,200\n"
        "Names: a, b, c, d, e, f, g, h, i, j, k, … (14 in all)\n"
        "Inner: an inner one\n"
        "Table:\n"
        "    name       n\n"
        "    v0         1\n"
        "    v1        10\n"
        "    v2       100\n"
        "    v3     1,000\n"
        "    v4    10,000\n"
        "    …          …\n"
        "    v24    1e+24\n"
        "    v25    1e+25\n"
        "    v26    1e+26\n"
        "    v27    1e+27\n"
        "    v28    1e+28\n"
        "    v29    1e+29"
    )


def test_long_texts_are_wrapped_and_columns_that_do_not_fit_left_out():
    wide = Table([f"column {k}" for k in range(20)], [range(20)])
    told = Table.listing(["1 word after another " * 9, "2"])
    lines = repr(Example(Summary("", {"Fact": "some words " * 20}, {"W": wide, "T": told})))
    assert max(map(len, lines.splitlines())) <= 100
    assert "  column 8  …\n" in lines
    assert "\n    2" in lines  # sentences are not aligned as numbers are
    html = Example(Summary("", {}, {"W": wide}))._repr_html_()
    assert "column 19" in html


def test_an_error_is_named_inside_and_outside():
    class Broken(Example):
        def _summary(self) -> Summary:
            raise KeyError("<gone>")

    broken = Broken(Summary())
    assert repr(broken) == "<Broken> not complete: KeyError: '<gone>'"
    outer = Example(Summary("fine", {}, {"Part": broken}))
    assert "not complete: KeyError" in repr(outer)
    assert "fine" in text_of(outer._repr_html_())
    assert "'<gone>'" in text_of(outer._repr_html_())


def test_calls_show_changed_arguments_and_no_secrets():
    class Service(PrintedAsCall):
        def __init__(self, project, runs=(), size=1, flag=None, **init):
            self.project, self._runs, self.size, self.flag = project, runs, size, flag
            self._init = self.init = init

    made = Service(Path("a") / "b", runs=[1, 2], api_token="secret", size=1)
    assert repr(made) == "Service(project='a/b', runs=[1, 2])"
    assert "secret" not in made._repr_html_()
    made.flag = np.zeros(1000)
    assert repr(made) == "Service(project='a/b', runs=[1, 2], flag=<ndarray>)"
    made.flag = xr.Dataset({"a": ("x", [1])})
    assert repr(made) == "Service(project='a/b', runs=[1, 2], flag=<Dataset x: 1>)"


@given(st.floats(-1e300, 1e300))
def test_numbers_have_four_digits(number):
    read = float(shown(number).replace(",", ""))
    assert read == pytest.approx(number, rel=5.1e-4, abs=0)
    assert float(shown(np.float32(0.1))) == 0.1


@given(st.integers(0, 40), st.integers(5, 20))
def test_tables_keep_first_and_last_rows(n, most):
    cells = Table(("row",), [(k,) for k in range(n)]).cells(most)[1:]
    assert len(cells) == min(n, most)
    numbers = [int(cell) for (cell,) in cells if cell != "…"]
    assert (numbers == list(range(n))) == (n <= most)
    assert numbers == sorted(numbers)
    assert numbers[:1] + numbers[-1:] == ([0, n - 1] if n else [])


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345_678, "12.35 MB"), (3e15, "3000 TB")],
)
def test_bytes(number, text):
    assert bytes_text(number) == text


def test_a_plan_of_many_blocks_is_short():
    ds = splits.assign_block_split(cube("t"), {"time": 1, "lat": 1, "lon": 1}, 0.5)
    plan = read_recipe(ds["split"].attrs[RECIPE_ATTR])[0]
    assert isinstance(plan, SplitPlan)
    assert len(repr(plan)) < 500
