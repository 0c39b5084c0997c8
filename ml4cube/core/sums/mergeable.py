"""`Mergeable`: what is summed up over cells, in any parts, and sent or kept as JSON."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol, Self

import cftime
import numpy as np
from numpy.typing import NDArray

# Dates of other calendars are written as integers in this unit, which is exact.
_TICKS = "microseconds since 2000-01-01"


class Mergeable(Protocol):
    """Sums over cells: `of` some cells, and merged into those of all, whatever the parts."""

    #: Sums up cells; what these are depends on the class.
    of: ClassVar[Callable[..., Any]]

    def merge(self, other: Self) -> Self:
        """Return the sums over the cells of both; neither operand changes."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; arrays are compressed and base64-encoded.

        Returns
        -------
        dict
            One entry per field.
        """
        entries = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                entries[field.name] = _to_json_value(value)
        return entries

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read the dict that `to_dict` returned.

        Parameters
        ----------
        raw : mapping
            One entry per field.

        Returns
        -------
        Self
            Equal to the original, bit for bit.
        """
        return cls(**{name: _from_json_value(value) for name, value in raw.items()})

    def to_json(self) -> str:
        """Return the sums as JSON; every bit is kept.

        Returns
        -------
        str
            A JSON object.
        """
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` returned.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        Self
            Equal to the original.
        """
        return cls.from_dict(json.loads(text))


def _to_json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return encoded(value)
    if isinstance(value, Mapping):
        return {name: _to_json_value(part) for name, part in value.items()}
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, float) and np.isnan(value):
        return None
    return value


def _from_json_value(value: Any) -> Any:
    if value is None:
        return float("nan")
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, Mapping):
        return value
    if "dtype" in value:
        return decoded(value)
    return {name: _from_json_value(part) for name, part in value.items()}


def encoded(values: NDArray[Any]) -> dict[str, Any]:
    """Return an array as JSON values: its compressed bytes, or a list of strings."""
    values = np.asarray(values)
    entry: dict[str, Any] = {"shape": list(values.shape)}
    if values.dtype.kind in "OUT":
        listed = values.ravel().tolist()
        if listed and all(isinstance(value, cftime.datetime) for value in listed):
            ticks = np.asarray(cftime.date2num(values, _TICKS, listed[0].calendar), np.int64)
            return {**encoded(ticks), "calendar": listed[0].calendar}
        texts = all(isinstance(value, str) for value in listed)
        shown = [str(value) for value in listed]
        return {**entry, "dtype": "text" if texts else "object", "values": shown}
    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<")))
    if little.dtype.kind == "f":
        # One kind of NaN and of zero, so that equal arrays have equal bytes.
        little = np.where(np.isnan(little), np.array(np.nan, little.dtype), little + 0)
    content = base64.b64encode(zlib.compress(little.tobytes(), 1)).decode()
    return {**entry, "dtype": values.dtype.newbyteorder("<").str, "zlib": content}


def decoded(entry: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array that `encoded` was given."""
    shape = tuple(entry["shape"])
    if entry["dtype"] == "text":
        return np.array(entry["values"], dtype=str).reshape(shape)
    content = zlib.decompress(base64.b64decode(entry["zlib"]))
    dtype = np.dtype(entry["dtype"])
    values = np.frombuffer(content, dtype).reshape(shape)
    if "calendar" in entry:
        dates: NDArray[Any] = cftime.num2date(values, _TICKS, entry["calendar"])
        return dates
    return values.astype(dtype.newbyteorder("="))
