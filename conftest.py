"""What holds for every test and doctest."""

import os

import pytest


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
