"""What a callback is: an object told at fixed moments what the loop does.

A callback sees the loop on every rank. What it writes or shows, it does where
``loop.world.is_main``. What it learns over time goes into `state_dict`, and so into snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from ml4cube.training.run.loop import Loop


class Callback:
    """Base of all callbacks: empty methods, override those you need.

    Examples
    --------
    >>> class Shout(Callback):
    ...     def on_epoch_end(self, loop, row):
    ...         print(row["train_loss"])
    """

    writes = False  # whether it leaves something behind; left out of a fast_dev_run

    def on_train_start(self, loop: Loop) -> None:
        """Run before the first step, after a snapshot was resumed.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def on_epoch_start(self, loop: Loop) -> None:
        """Run before the first step of an epoch.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def on_step_end(self, loop: Loop) -> None:
        """Run after every optimizer step.

        Parameters
        ----------
        loop : Loop
            The loop; ``loop.step_loss`` is the loss of the step's last batch, a tensor. To read it
            makes the device wait, so read it now and then only.
        """

    def on_row(self, loop: Loop, row: dict[str, Any]) -> None:
        """Run after validation, before the row enters the History; add columns here.

        Parameters
        ----------
        loop : Loop
            The loop.
        row : dict
            The epoch's row; what is added must be the same on every rank.
        """

    def on_validation_start(self, loop: Loop) -> None:
        """Run before a validation pass of training.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def on_validation_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Run after a validation pass of training.

        Parameters
        ----------
        loop : Loop
            The loop.
        row : dict
            The row of the History with the pass's loss and metrics, the same on every rank.
        """

    def on_check(self, loop: Loop, row: dict[str, Any]) -> None:
        """Run when a run is judged: after every validation, or every epoch without one.

        Parameters
        ----------
        loop : Loop
            The loop; `loop.stop` ends it.
        row : dict
            The row of the History, the same on every rank.
        """

    def on_epoch_end(self, loop: Loop, row: dict[str, Any]) -> None:
        """Run after validation, before the snapshot.

        Parameters
        ----------
        loop : Loop
            The loop; `loop.stop` ends it after this epoch.
        row : dict
            The epoch's row of the History, the same on every rank.
        """

    def on_train_end(self, loop: Loop) -> None:
        """Run once when training ended of itself, after the last snapshot.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def on_close(self, loop: Loop) -> None:
        """Run last, also after an error, to give back what was opened.

        Parameters
        ----------
        loop : Loop
            The loop.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know: tensors and plain Python.

        Returns
        -------
        dict
            Empty by default.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Parameters
        ----------
        state : mapping
            From a snapshot.
        """

    def forget(self) -> None:
        """Forget what was best so far: it cannot be compared with what comes.

        Called in place of `load_state_dict` where a run goes on with another loss, another metric
        or other validation data, if they decide about the callback's `monitor`.
        """


def listed(given: Any) -> list[Any]:
    """Return what an argument holds that takes one object or several.

    Parameters
    ----------
    given : object, iterable of object, or None
        As the user gave it.

    Returns
    -------
    list
        Empty for None.

    Examples
    --------
    >>> listed(None), listed("one"), listed(("one", "two"))
    ([], ['one'], ['one', 'two'])
    """
    if given is None:
        return []
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return list(given) if several else [given]


def as_callbacks(given: Any) -> list[Callback]:
    """Return the callbacks of a run.

    Parameters
    ----------
    given : Callback, iterable of Callback, or None
        As the user gave them.

    Returns
    -------
    list of Callback
        In the same order.

    Raises
    ------
    InvalidTypeError
        If one is none.
    """
    callbacks = listed(given)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise InvalidTypeError(
                f"callbacks has {callback!r}, no Callback; give objects of subclasses of Callback"
            )
    return callbacks


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Whether a value beats the best so far.

    Parameters
    ----------
    value : float
        The new one; NaN never wins.
    best : float or None
        The best so far; anything but NaN beats None.
    mode : {"min", "max"}
        Which way is better.

    Returns
    -------
    bool
        True only if strictly better.

    Examples
    --------
    >>> is_better(0.5, 0.7, "min"), is_better(math.nan, None, "min")
    (True, False)
    """
    if math.isnan(value):
        return False
    return best is None or (value < best if mode == "min" else value > best)


def monitored(row: Mapping[str, Any], monitor: str) -> float:
    """Return the value a callback watches.

    Parameters
    ----------
    row : mapping
        The epoch's row of the History.
    monitor : str
        Name of a column.

    Returns
    -------
    float
        Its value.

    Raises
    ------
    InvalidValueError
        If there is no such column.
    """
    if isinstance(row.get(monitor), int | float):
        return float(row[monitor])
    known = [name for name, value in row.items() if isinstance(value, int | float)]
    raise InvalidValueError(f"monitor={monitor!r} is no number of the History; it has {known}")
