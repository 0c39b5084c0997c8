"""Run a plain function on several gloo ranks that meet through a file: no port, no fork."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loky import ProcessPoolExecutor

from ml4cube.training.ranks.dist import launch

# A process takes seconds to import torch, more than most tests compute on it. All of a pool's
# processes take part in each launch, so that they are alike; a pool in which something failed goes.
_pools: dict[int, ProcessPoolExecutor] = {}


def on_ranks(nproc: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``fn(*args)`` on every rank; return what each of them gave, in rank order."""
    with kept_ranks():
        results: list[Any] = launch(_checked, nproc, fn, args, backend="gloo", timeout=timeout)
    return results


class TwoRanks(dict[str, Callable[[str], None]]):
    """Functions of a test file that run on two ranks, by name, each with a folder of its own.

    Starting ranks takes longer than what they do, so the functions of a file share them.
    """

    def add(self, function: Callable[[str], None]) -> Callable[[str], None]:
        """Add a function under its own name, as a decorator."""
        self[function.__name__] = function
        return function

    def fixture(self) -> Any:
        """Make the fixture `ran` of a file: the folder, and the errors of each rank."""

        @pytest.fixture(scope="module")
        def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
            folder = tmp_path_factory.mktemp("two_ranks")
            return folder, on_ranks(2, _run_each, dict(self), str(folder), timeout=120.0)

        return ran

    def test(self) -> Any:
        """Make the test of a file, after its last function."""

        @pytest.mark.slow
        @pytest.mark.parametrize("name", self)
        def test_on_two_ranks(ran: tuple[Path, list[dict[str, str]]], name: str) -> None:
            failed = [errors[name] for errors in ran[1] if name in errors]
            assert not failed, "\n".join(failed)

        return test_on_two_ranks


def _run_each(functions: dict[str, Callable[[str], None]], folder: str) -> dict[str, str]:
    """Call each function; return the errors of this rank by name."""
    failed = {}
    for name, function in functions.items():
        own = os.path.join(folder, name)
        os.makedirs(own, exist_ok=True)
        dist.barrier()
        try:
            function(own)
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


def assert_same_on_all_ranks(found: Any) -> None:
    """Compare what the ranks have; all call this."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    assert everywhere == [found] * len(everywhere)


def kept_ranks() -> AbstractContextManager[Any]:
    """Let `launch`, whoever calls it, take the processes of an earlier launch of as many ranks."""
    return mock.patch("loky.ProcessPoolExecutor", _KeptPool)


class _KeptPool:
    """A pool of the processes of an earlier launch of as many ranks, if there was one."""

    def __init__(self, max_workers: int, timeout: float | None) -> None:
        self._size = max_workers
        if max_workers not in _pools:
            _pools[max_workers] = ProcessPoolExecutor(max_workers=max_workers, timeout=timeout)
        self.submit = _pools[max_workers].submit

    def shutdown(self, wait: bool, kill_workers: bool) -> None:
        """Keep the processes for the next launch, unless something failed."""
        if kill_workers:
            _pools.pop(self._size).shutdown(wait=wait, kill_workers=True)


def _checked(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # as of a fresh process: alike on all ranks
    assert dist.get_backend() == "gloo"
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, fn(*args))
    return results
