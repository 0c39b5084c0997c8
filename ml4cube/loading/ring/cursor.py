"""EpochCursor: which epoch a loader is in, and how far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml4cube.core.errors import InvalidValueError, check_whole


class EpochCursor:
    """Counts epochs and what is done of the current one, and can go on from a saved state."""

    # Every iteration is an epoch of its own: the one `set_epoch` named, else the next one.

    def __init__(self, identity: Mapping[str, Any]) -> None:
        self._identity = dict(identity)
        self._next = (0, 0)
        self._now = (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        check_whole("epoch", epoch, 0)
        if epoch != self._next[0]:
            self._next = (int(epoch), 0)
        self._now = self._next

    @property
    def coming(self) -> int:
        """The epoch that the next iteration will be."""
        return self._next[0]

    def begin(self) -> tuple[int, int]:
        """Begin an iteration."""
        self._now = self._next
        self._next = (self._now[0] + 1, 0)
        return self._now

    def advance(self, epoch: int, done: int) -> None:
        """Note progress."""
        if epoch == self._now[0]:
            self._now = (epoch, done)

    def finish(self, epoch: int) -> None:
        """Note that an epoch has come to its end."""
        if epoch == self._now[0]:
            self._now = (epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Say where the cursor stands, in plain numbers and words."""
        return {**self._identity, "epoch": self._now[0], "done": self._now[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where the state was taken."""
        given = {key: value for key, value in state.items() if key not in ("epoch", "done")}
        if given != self._identity or not {"epoch", "done"} <= set(state):
            raise InvalidValueError(
                f"the loader's state was saved with {given}, this loader has {self._identity}; "
                "an epoch can go on only with the same data and order"
            )
        for name in ("epoch", "done"):
            check_whole(name, state[name], 0)
        if state["done"] > self._identity.get("samples", state["done"]):
            raise InvalidValueError(
                f"the loader's state says that {state['done']} of {self._identity['samples']} "
                "samples are done; give one that state_dict returned"
            )
        self._next = self._now = (int(state["epoch"]), int(state["done"]))
