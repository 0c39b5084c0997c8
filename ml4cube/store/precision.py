"""How much of the samples' float variables is stored: narrower dtypes, fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, RunError, check_choice

_MANTISSA_BITS = {"float16": 10, "float32": 23, "float64": 52}


@dataclass(frozen=True)
class Precision:
    """What is kept of float variables on disk; picklable."""

    # Make one with `Precision.parse`. Values are rounded to ``keepbits`` bits of mantissa, half to
    # even (Klöwer et al. 2021, doi:10.1038/s43588-021-00156-2), after they were scaled and cast.

    # Dtype of variables; under ``""`` that of all others.
    dtypes: Mapping[str, str]
    # Bits of mantissa that are kept, likewise.
    keepbits: Mapping[str, int]

    @classmethod
    def parse(cls, dtype: Any, bitround: Any) -> Precision:
        """Read the sampler's `dtype` and `bitround`."""
        dtypes = {n: _float_dtype("dtype", d) for n, d in _by_name(dtype).items()}
        bits = {n: _bits(b) for n, b in _by_name(bitround).items()}
        return cls(dtypes, bits)

    def check_names(self, stored: Mapping[str, DTypeLike]) -> None:
        """Refuse variables that are not stored or no floats."""
        for argument, wishes in (("dtype", self.dtypes), ("bitround", self.keepbits)):
            for name in set(wishes) - {""}:
                if name not in stored:
                    raise InvalidValueError(
                        f"{argument} names {name!r}, the samples hold {list(stored)}"
                    )
                if np.dtype(stored[name]).kind != "f":
                    raise InvalidValueError(
                        f"{argument} names {name!r}, which is of dtype {np.dtype(stored[name])}; "
                        "only floats can be stored with less precision"
                    )
        for name, given in stored.items():
            bits, kind = self._of(self.keepbits, name), self.dtype(name, given)
            if np.dtype(given).kind == "f" and bits is not None and bits > _mantissa(kind):
                raise InvalidValueError(
                    f"bitround={bits} of {name!r}: {kind} has {_mantissa(kind)} bits of mantissa"
                )

    def dtype(self, name: str, given: DTypeLike) -> str:
        """Tell the dtype on disk."""
        wish = self._of(self.dtypes, name)
        return np.dtype(given).str if wish is None or np.dtype(given).kind != "f" else str(wish)

    def attrs(self, name: str, given: DTypeLike) -> dict[str, Any]:
        """Say in a variable's attributes that it was rounded."""
        bits = self._of(self.keepbits, name)
        return {} if bits is None or np.dtype(given).kind != "f" else {"ml4cube_keepbits": bits}

    def apply(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Cast and round samples."""
        if values.dtype.kind != "f":
            return values
        target = np.dtype(self.dtype(name, values.dtype))
        if target.itemsize < values.dtype.itemsize:
            values = _narrowed(name, values, target)
        elif target != values.dtype:
            values = values.astype(target)
        bits = self._of(self.keepbits, name)
        return values if bits is None else _rounded(values, bits)

    @staticmethod
    def _of(wishes: Mapping[str, Any], name: str) -> Any:
        return wishes.get(name, wishes.get(""))


def _by_name(wish: Any) -> dict[str, Any]:
    if wish is None:
        return {}
    return {str(n): w for n, w in wish.items()} if isinstance(wish, Mapping) else {"": wish}


def _float_dtype(argument: str, dtype: Any) -> str:
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise InvalidTypeError(
            f"{argument}={dtype!r} is no dtype; give one of {list(_MANTISSA_BITS)}"
        ) from None
    check_choice(argument, found.name, _MANTISSA_BITS)
    return str(found.newbyteorder("<").str)


def _bits(bits: Any) -> int:
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer):
        raise InvalidTypeError(f"bitround={bits!r} is no number of bits; give an integer")
    if bits < 1:
        raise InvalidValueError(f"bitround={bits} keeps nothing; give 1 or more bits")
    return int(bits)


def _mantissa(dtype: DTypeLike) -> int:
    return _MANTISSA_BITS[np.dtype(dtype).name]


def _narrowed(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    lost = np.isinf(cast) & np.isfinite(values)
    if lost.any():
        raise RunError(
            f"variable {name!r} holds {values[lost].flat[0]:g}, which is too large for dtype "
            f"{dtype.name} (at most {np.finfo(dtype).max:g}); scale it, or give a wider dtype"
        )
    return cast


def _rounded(values: NDArray[Any], bits: int) -> NDArray[Any]:
    from numcodecs.bitround import BitRound  # type: ignore[import-untyped]

    if bits >= _mantissa(values.dtype):
        return values
    # it takes the machine's byte order only
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    rounded = np.asarray(BitRound(bits).encode(native)).view(native.dtype)
    # rounding the bits of a NaN may make a number of it
    found = np.where(np.isfinite(values), rounded.reshape(values.shape), values)
    return found.astype(values.dtype, copy=False)
