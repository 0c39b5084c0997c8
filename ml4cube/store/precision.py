"""Storage precision of float variables: narrower dtypes, fewer bits of mantissa."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    RunError,
    check_choice,
    check_whole,
    listed,
)

_MANTISSA_BITS = {"float16": 10, "float32": 23, "float64": 52}


@dataclass(frozen=True)
class Precision:
    """Stored dtype and bits of mantissa of float variables."""

    # Make one with `Precision.parse`. Values are rounded to ``keepbits`` bits of mantissa, half to
    # even (Klöwer et al. 2021, doi:10.1038/s43588-021-00156-2), after they were scaled and cast.

    # Dtype by variable; ``""`` stands for all others.
    dtypes: Mapping[str, str]
    # Bits of mantissa by variable; ``""`` stands for all others.
    keepbits: Mapping[str, int]

    @classmethod
    def parse(cls, dtype: Any, bitround: Any) -> Precision:
        """Make a precision from the sampler's `dtype` and `bitround`."""
        dtypes = {n: _float_dtype("dtype", d) for n, d in _by_name(dtype).items()}
        bits = {n: check_whole("bitround", b, 1) for n, b in _by_name(bitround).items()}
        return cls(dtypes, bits)

    def check_names(self, stored: Mapping[str, DTypeLike]) -> None:
        """Raise for variables that are not stored or are not floats."""
        for argument, chosen in (("dtype", self.dtypes), ("bitround", self.keepbits)):
            for name in set(chosen) - {""}:
                if name not in stored:
                    raise InvalidValueError(
                        f"{argument}: unknown variable {name!r}; the samples have {listed(stored)}"
                    )
                if np.dtype(stored[name]).kind != "f":
                    raise InvalidValueError(
                        f"{argument}: {name!r} must be a float variable, got dtype "
                        f"{np.dtype(stored[name])}"
                    )
        for name, given in stored.items():
            bits, kind = self._of(self.keepbits, name), self.dtype(name, given)
            if np.dtype(given).kind == "f" and bits is not None and bits > _mantissa(kind):
                raise InvalidValueError(
                    f"bitround of {name!r} must be at most {_mantissa(kind)}, the mantissa of "
                    f"{kind}, got {bits}"
                )

    def dtype(self, name: str, given: DTypeLike) -> str:
        """Return the dtype on disk."""
        choice = self._of(self.dtypes, name)
        return np.dtype(given).str if np.dtype(given).kind != "f" or not choice else str(choice)

    def attrs(self, name: str, given: DTypeLike) -> dict[str, Any]:
        """Return the attribute that records the rounding of a variable."""
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
    def _of(chosen: Mapping[str, Any], name: str) -> Any:
        return chosen.get(name, chosen.get(""))


def _by_name(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {}
    return {str(n): w for n, w in choice.items()} if isinstance(choice, Mapping) else {"": choice}


def _float_dtype(argument: str, dtype: Any) -> str:
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise InvalidTypeError(
            f"{argument} must be {listed(_MANTISSA_BITS, 'or')}, got {dtype!r}"
        ) from None
    check_choice(argument, found.name, _MANTISSA_BITS)
    return str(found.newbyteorder("<").str)


def _mantissa(dtype: DTypeLike) -> int:
    return _MANTISSA_BITS[np.dtype(dtype).name]


def _narrowed(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    lost = np.isinf(cast) & np.isfinite(values)
    if lost.any():
        raise RunError(
            f"variable {name!r} has the value {values[lost].flat[0]:g}, which is too large for "
            f"dtype {dtype.name} (at most {np.finfo(dtype).max:g}); scale it, or use a wider dtype"
        )
    return cast


def _rounded(values: NDArray[Any], bits: int) -> NDArray[Any]:
    from numcodecs.bitround import BitRound  # type: ignore[import-untyped]

    if bits >= _mantissa(values.dtype):
        return values
    # it supports only native byte order
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    rounded = np.asarray(BitRound(bits).encode(native)).view(native.dtype)
    # rounding the bits of a NaN may turn it into a number
    found = np.where(np.isfinite(values), rounded.reshape(values.shape), values)
    return found.astype(values.dtype, copy=False)
