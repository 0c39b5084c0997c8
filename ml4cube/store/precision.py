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
from ml4cube.core.statistics import Statistics

# Key of the setting for all variables that are not named.
_OTHERS = ""
_DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Precision:
    """Stored dtype and bits of mantissa of float variables, by name; see `parse`.

    Values are rounded to ``keepbits`` bits of mantissa, half to even (Klöwer et al. 2021,
    doi:10.1038/s43588-021-00156-2), after they were scaled and cast.
    """

    dtypes: Mapping[str, str]
    keepbits: Mapping[str, int]

    @classmethod
    def parse(cls, dtype: Any, bitround: Any) -> Precision:
        """Make a precision from the sampler's `dtype` and `bitround`."""
        dtypes = {n: _float_dtype(d) for n, d in _by_name(dtype).items()}
        bits = {n: check_whole("bitround", b, 1) for n, b in _by_name(bitround).items()}
        return cls(dtypes, bits)

    def check_names(self, stored: Mapping[str, DTypeLike]) -> None:
        """Raise for variables that are not stored or are not floats."""
        for argument, chosen in (("dtype", self.dtypes), ("bitround", self.keepbits)):
            for name in set(chosen) - {_OTHERS}:
                if name not in stored:
                    raise InvalidValueError(
                        f"{argument}: unknown variable {name!r}; the samples have {listed(stored)}"
                    )
                if np.dtype(stored[name]).kind != "f":
                    raise InvalidValueError(
                        f"{argument}: {name!r} must be a float variable, got dtype "
                        f"{np.dtype(stored[name])}"
                    )
        for name, stored_dtype in stored.items():
            bits, dtype = self._keepbits(name, stored_dtype), self.dtype(name, stored_dtype)
            if bits is not None and bits > (most := np.finfo(dtype).nmant):
                raise InvalidValueError(
                    f"bitround of {name!r} must be at most {most}, the mantissa of {dtype}, got "
                    f"{bits}"
                )

    def check_unscaled(self, statistics: Statistics, stored: Mapping[str, DTypeLike]) -> None:
        """Raise for unscaled variables that a narrower dtype would round to 0, or nearly so."""
        for name, stats in statistics.items():
            dtype = np.dtype(self.dtype(name, stored[name]))
            is_narrowed = dtype.itemsize < np.dtype(stored[name]).itemsize
            largest, least = max(abs(stats.min), abs(stats.max)), float(np.finfo(dtype).tiny)
            if is_narrowed and 0 < largest < least:
                raise InvalidValueError(
                    f"dtype of {name!r}: its values, at most {largest:g}, are below {least:g}, "
                    f"where {dtype.name} loses digits; scale it (scale_fn), or use a wider dtype"
                )

    def dtype(self, name: str, dtype: DTypeLike) -> str:
        """Return the dtype on disk of a variable of a given dtype."""
        original = np.dtype(dtype)
        chosen = self.dtypes.get(name, self.dtypes.get(_OTHERS))
        if original.kind == "f" and chosen:
            return chosen
        return original.str

    def attrs(self, name: str, dtype: DTypeLike) -> dict[str, Any]:
        """Return the attribute that records the rounding of a variable."""
        bits = self._keepbits(name, dtype)
        if bits is None:
            return {}
        return {"ml4cube_keepbits": bits}

    def apply(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Cast and round samples."""
        if values.dtype.kind != "f":
            return values
        target = np.dtype(self.dtype(name, values.dtype))
        if target != values.dtype:
            values = _cast(name, values, target)
        bits = self._keepbits(name, values.dtype)
        if bits is None:
            return values
        return _rounded(values, bits)

    def _keepbits(self, name: str, dtype: DTypeLike) -> int | None:
        is_float = np.dtype(dtype).kind == "f"
        if is_float:
            return self.keepbits.get(name, self.keepbits.get(_OTHERS))
        return None


def _by_name(setting: Any) -> dict[str, Any]:
    if setting is None:
        return {}
    if isinstance(setting, Mapping):
        return {str(name): value for name, value in setting.items()}
    return {_OTHERS: setting}


def _float_dtype(dtype: Any) -> str:
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        raise InvalidTypeError(f"dtype must be {listed(_DTYPES, 'or')}, got {dtype!r}") from None
    check_choice("dtype", parsed.name, _DTYPES)
    return str(parsed.newbyteorder("<").str)


def _cast(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
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

    # it supports only native byte order
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    rounded = np.asarray(BitRound(bits).encode(native)).view(native.dtype)
    # rounding the bits of a NaN may turn it into a number
    safe = np.where(np.isfinite(values), rounded.reshape(values.shape), values)
    return safe.astype(values.dtype, copy=False)
