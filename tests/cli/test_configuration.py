"""YAML files, options and ``--set``: how they are read, and which one wins."""

import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ml4cube.cli.configuration import as_yaml, merged, read_file, read_value
from ml4cube.errors import InvalidValueError
from tests.cli.running import error_of, invoke

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
