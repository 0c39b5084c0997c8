"""Seeding everything at once: the one place of this package that sets global generators."""

from __future__ import annotations

import random

import numpy as np
import torch

from ml4cube.core.errors import InvalidValueError


def seed_everything(seed: int) -> int:
    """Seed the global generators of Python, numpy and torch, on all devices.

    Nothing else in ml4cube sets global random state: results do not need this. It is for a script
    of your own that draws from those generators, for example to initialize a model.

    Parameters
    ----------
    seed : int
        From 0 to 2³² - 1, which is what numpy takes.

    Returns
    -------
    int
        The seed.

    Raises
    ------
    InvalidValueError
        If it is outside.

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
        raise InvalidValueError(f"seed={seed!r} is no seed; use an int from 0 to 2**32 - 1")
    number = int(seed)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global generator is what is asked for
    torch.manual_seed(number)
    return number
