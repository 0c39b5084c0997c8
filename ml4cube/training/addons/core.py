"""Base class of add-ons, and how they are applied to a Trainer class."""

from __future__ import annotations

import copyreg
import functools
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Sequence
from typing import Any

from ml4cube.core.errors import InvalidTypeError

# Base class of mixins that call methods of the Trainer; Any, so that mypy does not look for them.
TrainerBase: Any = object


class AddOnBase(ABC):
    """Base class of add-ons: `apply` takes a Trainer class and returns a subclass of it.

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
            A Trainer class, perhaps with other add-ons.

        Returns
        -------
        type
            A subclass whose ``__init__`` takes its own keyword arguments and passes on the others.
        """


class MixinAddOn(AddOnBase):
    """An add-on that puts a mixin, if it has one, in front of the Trainer class."""

    mixin: type | None = None

    @classmethod
    def apply(cls, base_cls: Any) -> Any:
        """Return a subclass of the mixin and the Trainer class."""
        name = f"TrainerWith{cls.__name__.removesuffix('Addon')}"
        bases = [part for part in (cls.mixin, base_cls) if part is not None]
        # Without a module, Python would name that of ABCMeta.
        return type(base_cls)(name, tuple(bases), {"__module__": base_cls.__module__})


class Combinable(ABCMeta):
    """Metaclass of Trainer classes, so that classes made by add-ons can be pickled.

    Such a class cannot be imported by name, so it is pickled as the class and the add-on that it
    was made of. It is an ABCMeta, so that a user's Trainer may have an abstract base, too.
    """

    add_ons: tuple[type[AddOnBase], ...] = ()  # all that are applied, the first one first


def combine(base: Combinable, add_ons: Sequence[type[AddOnBase]]) -> Any:
    """Apply add-ons to a class, one after the other, each at most once."""
    for add_on in add_ons:
        if not isinstance(add_on, type) or not issubclass(add_on, AddOnBase):
            raise InvalidTypeError(f"add_on() takes subclasses of AddOnBase, got {add_on!r}")
        if add_on not in base.add_ons:
            base = _apply_once(base, add_on)
    return base


@functools.cache
def _apply_once(base: Combinable, add_on: type[AddOnBase]) -> Any:
    """Return the subclass that an add-on makes of a class: the same one in every call."""
    subclass: Any = add_on.apply(base)
    if not isinstance(subclass, type) or not issubclass(subclass, base) or subclass is base:
        raise InvalidTypeError(
            f"{add_on.__name__}.apply() must return a subclass of {base.__name__}, other than "
            f"itself, got {subclass!r}"
        )
    subclass.add_ons = (*base.add_ons, add_on)
    subclass._made_of = (base, add_on)
    return subclass


def _reduce_class(cls: Combinable) -> Any:
    """Return how pickle makes a class again, or its name if it can be imported."""
    # Not by getattr: a class that a user derives from one with add-ons can be imported by name.
    made_of = vars(cls).get("_made_of")
    if made_of is None:
        return cls.__qualname__
    return (_apply_once, made_of)


copyreg.pickle(Combinable, _reduce_class)
