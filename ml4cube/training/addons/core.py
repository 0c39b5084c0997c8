"""Base class of add-ons, and how they are applied to a Trainer class."""

from __future__ import annotations

import copyreg
import functools
from abc import ABC, abstractmethod
from typing import Any

from ml4cube.core.errors import InvalidTypeError

# A mixin stands in front of a Trainer and may call its methods: mypy is not to look for them.
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
    """An add-on that puts a mixin in front of the Trainer class."""

    mixin: type

    @classmethod
    def apply(cls, base_cls: Any) -> Any:
        """Return a subclass of the mixin and the Trainer class."""
        name = f"TrainerWith{cls.mixin.__name__.strip('_')}"
        return type(base_cls)(name, (cls.mixin, base_cls), {})


class Combinable(type):
    """Metaclass of Trainer classes, so that classes made by add-ons can be pickled."""

    # Such a class cannot be imported by name, so it is pickled as its base class and its add-on.

    add_ons: tuple[type[AddOnBase], ...] = ()


def combine(base: type, add_ons: tuple[type[AddOnBase], ...]) -> Any:
    """Apply add-ons to a class, one after the other, each at most once."""
    for add_on in add_ons:
        if not isinstance(add_on, type) or not issubclass(add_on, AddOnBase):
            raise InvalidTypeError(f"add_on() takes subclasses of AddOnBase, got {add_on!r}")
        if add_on not in getattr(base, "add_ons", ()):
            base = _apply(base, add_on)
    return base


@functools.cache
def _apply(base: Any, add_on: type[AddOnBase]) -> Any:
    made: Any = add_on.apply(base)
    is_subclass = isinstance(made, type) and issubclass(made, base)
    if not is_subclass:
        raise InvalidTypeError(
            f"{add_on.__name__}.apply() must return a subclass of {base.__name__}, got {made!r}"
        )
    if made is base:
        return base
    made.add_ons = (*base.add_ons, add_on)
    made._made_of = (base, add_on)
    return made


def _reduce_class(cls: Any) -> Any:
    # A class that a user derives from it can be imported by name.
    made_of = cls.__dict__.get("_made_of")
    return cls.__qualname__ if made_of is None else (_apply, made_of)


copyreg.pickle(Combinable, _reduce_class)
