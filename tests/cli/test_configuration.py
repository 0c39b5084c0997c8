"""YAML files, options and ``--set``: how they are read, and which one wins."""

import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ml4cube.cli import configuration
from ml4cube.cli.configuration import as_yaml, merged, read_file, read_value
from ml4cube.errors import InvalidValueError
from tests.cli.running import error_of, invoke, small_cube

AWKWARD = ["no", "on", "1e-3", "1_000", "010", "11:30", "2001-01-01", "~", "", ".5", "=", "a: b"]
LETTERS = "aenoy01.-_: #'\"[]{},&*!|>%@`~=+/é"
TEXTS = st.text(LETTERS, max_size=6) | st.sampled_from(AWKWARD)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1))
def test_a_configuration_that_was_written_is_read_again(values, folder):
    Path("x.yaml").write_text(as_yaml("sample", values, {}), encoding="utf-8")
    assert read_file("x.yaml") == values


@settings(max_examples=100)
@given(text=TEXTS)
def test_texts_are_quoted_where_other_readers_would_see_something_else(text):
    assert yaml.safe_load(as_yaml("sample", {"a": text}, {})) == {"a": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("7", 7),
        ("-.inf", -math.inf),
        ("no", "no"),  # nitric oxide
        ("true", True),
        ("null", None),
        ("11:30:00", "11:30:00"),
        ("30D", "30D"),
        ("2001-01-01", "2001-01-01"),
        ("my_models:UNet", "my_models:UNet"),
        ("[t2m, no]", ["t2m", "no"]),
        ("{lat: 2, lon: 0.5}", {"lat": 2, "lon": 0.5}),
    ],
)
def test_values(text, value):
    found = read_value("x", text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("value", ["[a", "{a: b", "a: b: c", "'a"])
def test_what_is_not_yaml_is_refused(value):
    with pytest.raises(InvalidValueError, match=r"overlap must be YAML, such as .*, got "):
        read_value("overlap", value)


def test_later_ones_win():
    file = {"a": 1, "b": 1, "c": {"x": 1, "y": 1}, "optimizer": "AdamW"}
    found = merged(
        file, {"b": 2, "c": {"x": 2}}, ["c.y=3", "d.e.f=4", "optimizer.lr=1e-2"], {"optimizer"}
    )
    assert found == {
        "a": 1,
        "b": 2,
        "c": {"x": 2, "y": 3},
        "d": {"e": {"f": 4}},
        "optimizer": {"class": "AdamW", "lr": 0.01},
    }
    assert file["c"] == {"x": 1, "y": 1}


def test_set_does_not_drop_what_a_number_said():
    with pytest.raises(InvalidValueError, match=r"overlap is 0\.5, which has no keys"):
        merged({"overlap": 0.5}, {}, ["overlap.lat=0.25"], ())


def test_keys_given_twice_are_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("seed: 1\nsize: {lat: 2}\nseed: 2\n")
    with pytest.raises(InvalidValueError, match="'seed' is given twice"):
        read_file(str(path))
    with pytest.raises(InvalidValueError, match="'lat' is given twice"):
        read_value("size", "{lat: 2, lat: 3}")


def test_print_config_is_complete_and_read_again(cube):
    line = "sample cube.zarr --sample-size '{lat: 2}' --set overlap.lat=0.5 --no-resume"
    text = invoke(f"{line} --print-config").stdout
    values = yaml.safe_load(text)
    arguments = list(yaml.safe_load(invoke("sample --print-config").stdout))
    assert list(values) == arguments
    assert "max_chunk_mb" in values
    assert (values["cube"], values["resume"], values["seed"]) == ("cube.zarr", False, 42)
    assert (values["sample_size"], values["overlap"]) == ({"lat": 2}, {"lat": 0.5})
    Path("x.yaml").write_text(text)
    assert invoke("sample --config x.yaml --print-config").stdout == text
    assert (
        yaml.safe_load(invoke("sample --config x.yaml --seed 1 --print-config").stdout)["seed"] == 1
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sample cube.zarr --sampl-size 3", "No such option '?--sampl-size'?.*--sample-size"),
        (
            "sample cube.zarr --set sampl_size=3",
            "'sampl_size'; did you mean 'sample_size'",
        ),
        ("sample --config wrong.yaml", "no argument 'ceed'; did you mean 'seed'"),
        ("sample --config list.yaml", "list.yaml must hold names of arguments and their values"),
        ("sample --config broken.yaml", "broken.yaml is not YAML"),
        ("sample --set overlap", "--set must be NAME=VALUE"),
        ("sample", "sample needs cube"),
        ("split cube.zarr", "split needs out"),
        ("split cube.zarr --out s.json --method tim", "method must be .* did you mean 'time'"),
        (
            "split cube.zarr --out s.json --method time --block-size '{lat: 2}'",
            "split with method='time' has no argument 'block_size'",
        ),
        ("split cube.zarr --out s.txt", "out must end in .json, got 's.txt'"),
        ("stats cube.zarr --out none/s.json", "is in a folder that does not exist"),
        ("stats cube.zarr --variables '[a, bb]'", "cube.zarr has no variable 'bb'"),
        ("sample cube.zarr --callback functions", "a name must be module:name"),
        ("sample cube.zarr --callback my_none:f", "there is no module 'my_none'"),
        ("inspect", "inspect needs cube"),
    ],
)
def test_what_was_asked_wrongly_is_named_in_one_line(cube, line, message):
    Path("wrong.yaml").write_text("cube: cube.zarr\nceed: 3\n")
    Path("list.yaml").write_text("- cube\n")
    Path("broken.yaml").write_text("cube: [\n")
    before = sorted(Path().rglob("*"))
    told = error_of(line)
    assert re.search(message, told), told
    assert sorted(Path().rglob("*")) == before


LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
BROKEN = {
    "cube: !!timestamp foo": "could not determine a constructor",
    "cube: !!int foo": "invalid literal",
    "cube: !!bool foo": "'foo'",
    "cube: !!float ''": "string index out of range",
    "cube: !!set {a, b}": "could not determine a constructor",
    "cube: !!python/object/apply:os.mkdir [executed]": "could not determine a constructor",
    "cube: &a [*a]": "has more than 100,000 values, or one inside itself",
    "cube: &a {x: *a}": "has more than 100,000 values, or one inside itself",
    LAUGHS: "has more than 100,000 values, or one inside itself",
    "cube: " + "[" * 5000 + "]" * 5000: "it is nested too deeply",
    "seed: " + "1" * 5001: "Exceeds the limit (4300 digits)",
}


@pytest.mark.parametrize(("text", "message"), BROKEN.items())
def test_broken_files_are_refused_in_one_sentence(folder, text, message):
    Path("broken.yaml").write_text(text)
    told = error_of("sample --config broken.yaml")
    assert told.startswith("ml4cube sample: broken.yaml is not YAML: ")
    assert message in told
    assert len(told) < 300
    assert not Path("executed").exists()


def test_a_long_number_is_not_repeated_in_the_message(folder):
    assert len(error_of(f"sample cube.zarr --seed {'1' * 5001}")) < 300


def test_aliases_may_be_used(folder):
    Path("x.yaml").write_text("a: &a [lat, lon]\nb: *a\n")
    assert read_file("x.yaml") == {"a": ["lat", "lon"], "b": ["lat", "lon"]}


def test_many_keys_are_read_in_linear_time(folder, monkeypatch):
    """20,000 keys took 25 s; each is compared with no other."""

    class Key(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Key.compared += 1
            return str.__eq__(self, other)

    loader = configuration._Loader
    read = loader.construct_yaml_str
    constructors = {
        **loader.yaml_constructors,
        "tag:yaml.org,2002:str": lambda self, node: Key(read(self, node)),
    }
    monkeypatch.setattr(loader, "yaml_constructors", constructors)
    Path("x.yaml").write_text("".join(f"k{number}: 1\n" for number in range(2000)))
    assert len(read_file("x.yaml")) == 2000
    assert Key.compared < 20_000


UNREADABLE = {
    "inspect 3": "3 cannot be opened as a cube",
    "sample --config number.yaml": "cube must be a path or URL, got 3",
    "train --config numbers.yaml": "val_store must be a path or URL, got 3",
    "sample --config none.yaml": "none.yaml cannot be read",
    "inspect none.zarr": "none.zarr cannot be opened as a cube",
    "inspect none.nc": "none.nc cannot be opened as a cube",
    "sample none.zarr --sample-size '{lat: 2}'": "none.zarr cannot be opened as a cube",
    "stats cube.zarr --recipe none.json": "none.json cannot be read",
    "sample cube.zarr --sample-size '{lat: 2}' --statistics none.json": "none.json cannot be read",
    "evaluate none.zarr cube.zarr": "none.zarr cannot be opened as a cube",
    "evaluate cube.zarr cube.zarr --metrics true": "metrics must be a name or a list of names",
    "evaluate cube.zarr cube.zarr --baselines true": "baselines must hold names",
    "rerun none.zarr": "none.zarr is not a sample store",
    "doctor none.zarr": "none.zarr does not exist",
    "predict cube.zarr --out x.zarr --run x.txt": "run must be a folder of ml4cube train, x.txt",
    "predict cube.zarr --out x.zarr --run none": "run must be a folder of ml4cube train, none has",
    "inspect x.tif": "run `pip install rioxarray` (on the command line with --engine rasterio",
    "inspect x.grib": "run `pip install cfgrib` (on the command line with --engine cfgrib",
    "inspect x.cdf": "run `pip install cdflib` and convert",
    "inspect x.nc": "it is not netCDF",
    "inspect x.txt --engine none": "unrecognized engine 'none'",
    "inspect foo://bucket/x.zarr": "Protocol not known: foo",
}


@pytest.mark.parametrize(("line", "message"), UNREADABLE.items())
def test_what_cannot_be_opened_was_asked_wrongly(cube, line, message):
    for name in ("x.txt", "x.tif", "x.grib", "x.cdf", "x.nc"):
        Path(name).write_text("no data")
    Path("number.yaml").write_text("cube: 3\n")
    Path("numbers.yaml").write_text(
        "train_store: t.zarr\nval_store: 3\nmodel: torch.nn:Identity\noptimizer: SGD\n"
        "loss: MSELoss\n"
    )
    told = error_of(line)
    assert message in told
    assert told.count(". ") <= 1


def test_an_object_store_without_credentials_was_asked_wrongly(folder, monkeypatch):
    pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    told = error_of("inspect s3://a-bucket/cube.zarr")
    assert "s3://a-bucket/cube.zarr cannot be opened as a cube: Unable to locate cred" in told
    told = error_of("predict cube.zarr --run s3://a-bucket/run --out out.zarr")
    assert "s3://a-bucket/run/config.yaml cannot be read: Unable to locate credentials" in told


def test_netcdf_without_its_package_says_what_to_install(folder, monkeypatch):
    import xarray as xr

    small_cube().to_netcdf("cube.nc", engine="h5netcdf")
    small_cube().to_netcdf("classic.cdf", format="NETCDF3_CLASSIC", engine="scipy")
    monkeypatch.setattr(xr.backends.plugins, "guess_engine", _no_engine)
    monkeypatch.setattr(xr.backends, "list_engines", dict)
    assert "netCDF-4 needs netCDF4 or h5netcdf; run `pip install netCDF4`" in error_of(
        "inspect cube.nc"
    )


def _no_engine(*_, **__):
    raise ValueError("their dependencies may not be installed")


def test_other_endings_that_xarray_reads_are_opened(folder):
    small_cube().to_netcdf("classic.cdf", format="NETCDF3_CLASSIC", engine="scipy")
    small_cube().to_netcdf("cube.h5", engine="h5netcdf")
    for name in ("classic.cdf", "cube.h5"):
        assert "decoded" in invoke(f"inspect {name} --no-gaps").stdout


def test_sample_refuses_a_target_without_a_feature(cube):
    line = "sample cube.zarr --variables a --to-pred a --sample-size '{lat: 2}' "
    line += "--block-size '{lat: 3, lon: 4}'"
    assert "to_pred=['a'] leaves no variable to predict from" in error_of(line)
    assert not Path("train.zarr").exists()
