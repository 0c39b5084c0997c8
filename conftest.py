"""What holds for every test and doctest."""

import importlib.util
import os
import re
from pathlib import Path

import hypothesis
import pytest

# No test is timed: machines that run them are busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

WITHOUT_TORCH = importlib.util.find_spec("torch") is None
NEEDS_TORCH = re.compile(
    r"^(from|import) (torch|ml4cube\.(training|prediction|demo|datasets\.pytorch)|tests\.training)",
    re.MULTILINE,
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore a test file that imports torch, or a part of ml4cube that does, at its top."""
    if WITHOUT_TORCH and collection_path.suffix == ".py":
        return NEEDS_TORCH.search(collection_path.read_text()) is not None or None
    return None


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_the_disk():
    """Let `os.fsync` return at once in this process.

    It guards against a power cut, which no test can make, and takes 5 ms a file: most of the time
    of tests that write stores. Tests that need to know of a sync replace `os.fsync` themselves, and
    those in tests/faults kill processes of their own, which sync as users' do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def few_processes_in_examples(request):
    """Let examples that start ranks take those of tests before, if there are any."""
    if isinstance(request.node, pytest.DoctestItem) and ".training." in request.node.name:
        from tests.distributed_runner import kept_ranks

        with kept_ranks():
            yield
    else:
        yield
