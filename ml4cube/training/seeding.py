"""Seed global random generators; nothing else in this package does."""

from __future__ import annotations

import random

import numpy as np
import torch

from ml4cube.core.errors import InvalidValueError


def seed_everything(seed: int) -> int:
    """Seed the global generators of Python, numpy and torch, on all devices.

    Nothing else in ml4cube changes global random state, and its results do not depend on it. Use
    this in your own script, for example before you initialize a model.

    Parameters
    ----------
    seed : int
        From 0 to 2³² - 1, the range of numpy.

    Returns
    -------
    int
        The seed.

    Raises
    ------
    InvalidValueError
        If `seed` is outside this range.

    Examples
    --------
    >>> seed_everything(7)
    7
    >>> first = torch.rand(2)
    >>> _ = seed_everything(7)
    >>> bool((torch.rand(2) == first).all())
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise InvalidValueError(f"seed must be an integer from 0 to 2**32 - 1, got {seed!r}")
    number = int(seed)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global generator is what is asked for
    torch.manual_seed(number)
    return number
