"""Files that survive: whole or absent, checked, and safe to load."""

import enum
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.errors import InvalidTypeError, StoreError, StoreExistsError
from ml4cube.training.files import checkpoint
from ml4cube.training.files.checkpoint import read_file, to_plain, write_file
from tests.training_parts import Planted, trainer

CONTENT = {"weights": torch.arange(5000.0), "names": ["a", ("b", 1)], "none": None, 3: 0.5}


def test_what_is_written_is_read_by_us_and_by_torch(tmp_path):
    path = tmp_path / "new" / "folder" / "file.pt"
    write_file(path, CONTENT)
    for content in (read_file(path), torch.load(path, weights_only=True)):
        assert torch.equal(content.pop("weights"), CONTENT["weights"])
        assert content == {key: CONTENT[key] for key in ("names", "none", 3)}
    assert os.listdir(path.parent) == ["file.pt"]


@settings(max_examples=60)
@given(where=st.integers(min_value=0), bit=st.integers(0, 7))
def test_any_flipped_bit_and_any_cut_is_noticed(tmp_path_factory, where, bit):
    path = tmp_path_factory.mktemp("flip") / "file.pt"
    write_file(path, {"weights": torch.arange(50.0)})
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"file\.pt"):
        read_file(path)
    data[where % len(data)] ^= 1 << bit
    path.write_bytes(data[: where % len(data)])
    with pytest.raises(StoreError, match=r"file\.pt"):
        read_file(path)


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        read_file(tmp_path / "no.pt")
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(StoreError, match="not written by ml4cube"):
        read_file(tmp_path / "other.pt")


@pytest.mark.parametrize("content", [b"my notes", b"", "weights"])
def test_a_file_of_others_is_not_replaced(tmp_path, content):
    path = tmp_path / "best.pt"
    if content == "weights":
        torch.save({"a": torch.ones(2)}, path)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(StoreExistsError, match=r"best\.pt exists and was not written by ml4cube"):
        (run := trainer(best_model_path=path)).train()
    assert path.read_bytes() == before
    assert not len(run.history)  # before the first epoch
    path.unlink()
    for _ in range(2):
        trainer(best_model_path=path).train()
    assert read_file(path)


@pytest.mark.parametrize("load", [read_file, lambda path: trainer(snapshot_path=path).train()])
def test_planted_pickle_is_never_executed(tmp_path, monkeypatch, load):
    """Not even when its checksum is right and the environment turns the safe default off."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path, mark = tmp_path / "file.pt", tmp_path / "executed"
    with path.open("w+b") as file:
        torch.save({"ml4cube_snapshot": 1, "model": Planted(mark)}, file)
        checkpoint._append_digest(file)
    with pytest.raises(StoreError, match=r"file\.pt holds more than tensors"):
        load(path)
    assert not mark.exists()


def test_a_snapshot_of_an_older_format_is_refused_by_name(tmp_path):
    path = tmp_path / "run.pt"
    trainer(snapshot_path=path).train()
    written = path.read_bytes()
    write_file(path, {**read_file(path), "ml4cube_snapshot": 6})
    with pytest.raises(StoreError, match=r"run\.pt is not a snapshot of format 7; give another"):
        trainer(snapshot_path=path).train()
    path.write_bytes(written)
    trainer(snapshot_path=path).train()


def test_older_formats_of_torch_are_refused(tmp_path):
    """Releases of torch before 2.6 execute pickles in them, whatever weights_only says."""
    path = tmp_path / "old.pt"
    with path.open("w+b") as file:
        torch.save({"a": torch.zeros(2)}, file, _use_new_zipfile_serialization=False)
        checkpoint._append_digest(file)
    with pytest.raises(StoreError, match=r"old\.pt is not in the zip format of torch\.save"):
        read_file(path)


def test_only_plain_values_are_written(tmp_path):
    plain = to_plain(
        {"f": np.float64(0.5), "s": np.str_("a"), "n": np.arange(3), "set": {1}, "b": np.bool_(1)}
    )
    assert type(plain["f"]) is float
    assert type(plain["s"]) is str
    assert plain["b"] is True
    assert torch.equal(plain["n"], torch.arange(3))
    with pytest.raises(InvalidTypeError, match=r"state\['a'\]\[1\] is a function"):
        write_file(tmp_path / "file.pt", {"a": [1, lambda: 0]})
    assert list(tmp_path.iterdir()) == []


class Phase(enum.StrEnum):
    """A text that a safe load refuses."""

    WARM_UP = "warm-up"


@pytest.mark.parametrize("value", [np.datetime64("2000-01-01"), Phase.WARM_UP, np.array(["a"])])
def test_nothing_is_written_that_could_not_be_read(tmp_path, value):
    with pytest.raises(InvalidTypeError, match=r"state\['a'\] is a"):
        write_file(tmp_path / "file.pt", {"a": value})


@pytest.mark.parametrize("array", [np.array(5.0), np.ones(2, ">f4")])
def test_arrays_keep_shape_and_values(tmp_path, array):
    write_file(tmp_path / "file.pt", {"a": array})
    np.testing.assert_array_equal(read_file(tmp_path / "file.pt")["a"].numpy(), array)
    assert read_file(tmp_path / "file.pt")["a"].shape == array.shape


def test_a_sparse_tensor_is_kept(tmp_path):
    write_file(tmp_path / "file.pt", {"neighbours": torch.eye(3).to_sparse()})
    found = read_file(tmp_path / "file.pt")["neighbours"]
    assert found.is_sparse
    assert torch.equal(found.to_dense(), torch.eye(3))


def test_a_view_does_not_drag_its_storage_along(tmp_path):
    write_file(tmp_path / "file.pt", {"row": torch.zeros(1000, 1000)[0]})
    assert (tmp_path / "file.pt").stat().st_size < 10_000
