"""Add-ons: classes that turn a Trainer class into one that can do more."""

from __future__ import annotations

import copyreg
import functools
from abc import ABC, abstractmethod
from typing import Any

from ml4cube.core.errors import InvalidTypeError


class AddOnBase(ABC):
    """Base of add-ons: `apply` takes a Trainer class and returns a subclass of it.

    Examples
    --------
    >>> from ml4cube.training.trainer import Trainer
    >>> class Remember(AddOnBase):
    ...     @classmethod
    ...     def apply(cls, base_cls):
    ...         class Remembering(base_cls):
    ...             def __init__(self, *args, **kwargs):
    ...                 self.note = kwargs.pop("note", None)
    ...                 super().__init__(*args, **kwargs)
    ...
    ...         return Remembering
    >>> Trainer.add_on(Remember).__name__
    'Remembering'
    """

    @classmethod
    @abstractmethod
    def apply(cls, base_cls: Any) -> Any:
        """Return a subclass of a Trainer class.

        Parameters
        ----------
        base_cls : type
            A Trainer class, with the add-ons there are already.

        Returns
        -------
        type
            A subclass; its ``__init__`` takes what it needs out of the keyword arguments and
            passes on the others.
        """


class Combinable(type):
    """The type of Trainer classes: those that add-ons made can be pickled too."""

    # Such a class has no name that an import would find. It is pickled as what it was made of, and
    # made of that again elsewhere.

    add_ons: tuple[type[AddOnBase], ...] = ()


def combine(base: type, add_ons: tuple[type[AddOnBase], ...]) -> Any:
    """Apply add-ons to a class, one after the other; one that is there already is left out."""
    for add_on in add_ons:
        if not isinstance(add_on, type):
            raise InvalidTypeError(
                f"add_on() got {add_on!r}, which is no class; give the add-on's class itself, not "
                "an object of it"
            )
        if not issubclass(add_on, AddOnBase):
            raise InvalidTypeError(
                f"add_on() got {add_on.__name__}, which is no add-on; derive it from AddOnBase and "
                "give it a classmethod apply(cls, base_cls)"
            )
        if add_on not in getattr(base, "add_ons", ()):
            base = _apply(base, add_on)
    return base


@functools.cache
def _apply(base: Any, add_on: type[AddOnBase]) -> Any:
    made: Any = add_on.apply(base)
    if not _is_subclass(made, base):
        raise InvalidTypeError(
            f"{add_on.__name__}.apply() returned {made!r}, no subclass of {base.__name__}; define "
            "class ...(base_cls) in it and return that"
        )
    if made is base:
        return base
    made.add_ons = (*base.add_ons, add_on)
    made._made_of = (base, add_on)
    return made


def _is_subclass(made: Any, base: type) -> bool:
    return isinstance(made, type) and issubclass(made, base)


def _reduce_class(cls: Any) -> Any:
    # Only the class itself: one that a user derives from it has a name of its own.
    made_of = cls.__dict__.get("_made_of")
    return cls.__qualname__ if made_of is None else (_apply, made_of)


copyreg.pickle(Combinable, _reduce_class)
