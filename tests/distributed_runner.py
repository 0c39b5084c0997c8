"""Run a plain function on several gloo ranks that meet through a file: no port, no fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ml4cube.training.ranks.dist import launch


def on_ranks(nproc: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``fn(*args)`` on every rank; return what each of them gave, in rank order."""
    results: list[Any] = launch(_checked, nproc, fn, args, timeout=timeout)
    return results


def _checked(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    torch.set_num_threads(1)
    assert dist.get_backend() == "gloo"
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, fn(*args))
    return results
