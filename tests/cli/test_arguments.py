"""Arguments of commands are those of the functions that they call."""

import inspect

import pytest

from ml4cube.cli.arguments import arguments_of
from ml4cube.cli.by_name import load
from ml4cube.cli.inputs import open_cube
from ml4cube.cli.main import program
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.evaluation import evaluate
from ml4cube.preprocessing import Statistics
from ml4cube.splits import assign_block_split, assign_region_split
from tests.cli.running import invoke

docscrape = pytest.importorskip("numpydoc.docscrape")

FUNCTIONS = [
    MultiProcSampler,
    evaluate,
    Statistics.from_cube,
    assign_block_split,
    assign_region_split,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_texts_are_those_that_numpydoc_reads(function):
    listed = docscrape.FunctionDoc(function)["Parameters"]
    expected = {
        name.strip(): (entry.type, " ".join(" ".join(entry.desc).split()).replace("``", ""))
        for entry in listed
        for name in entry.name.split(",")
    }
    found = arguments_of(function)
    assert {name: (a.kind, " ".join(a.text.split())) for name, a in found.items()} == expected
    signature = inspect.signature(function).parameters
    assert {name: a.default for name, a in found.items()} == {
        name: parameter.default for name, parameter in signature.items()
    }


@pytest.mark.parametrize("name", list(program.commands))
def test_every_argument_of_a_command_is_described_and_in_its_help(name):
    if name in ("train", "predict"):
        pytest.importorskip("torch")
    help_text = invoke(f"{name} --help").stdout
    for argument in program.commands[name].arguments().values():
        assert argument.text, argument
        assert argument.kind, argument
        option = f"--{argument.name.replace('_', '-')}"
        assert option in help_text or argument.name.upper() in help_text


@pytest.mark.parametrize("name", list(program.commands))
def test_arguments_that_a_command_gives_itself_exist(name):
    if name in ("train", "predict"):
        pytest.importorskip("torch")
    command = program.commands[name]
    functions = [load(path) for path in command._calls.values()]
    if "open_cube" in command._made:
        functions.append(open_cube)
    taken = {n for function in functions for n in arguments_of(function)}
    assert command._without <= taken


def test_help_says_which_method_has_an_argument():
    told = " ".join(invoke("split --help").stdout.split())
    assert "default: none; for block, time]" in told  # of gap
    assert "required; for region]" in told
    assert told.index("--block-size") < told.index("--gap") < told.index("--regions")
