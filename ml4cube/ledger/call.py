"""Is this the same call? What decides about a result, as fields, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ml4cube.core.errors import StoreExistsError

Fields = Mapping[str, Mapping[str, Any]]
"""JSON values by kind ("settings") and name."""

# Longer values are kept as a hash, which begins so.
_SHORT = 60
HASHED = "sha256 "
# Of more names of a kind, messages say only how many.
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class CallId:
    """All that decides about a result. Make one with `CallId.of`."""

    # Hash of the fields: the same for the same call.
    id: str
    # The fields, in which the hash stands for a long value.
    parts: Fields

    @classmethod
    def of(cls, fields: Fields) -> Self:
        """Hash the fields of a call."""
        text = json.dumps(fields, sort_keys=True)
        return cls(hashlib.sha256(text.encode()).hexdigest(), shortened(fields))

    @property
    def record(self) -> dict[str, Any]:
        """What a finished thing keeps of the call that made it."""
        return {"call": self.id, "call_parts": self.parts}

    def check_made(self, target: object, record: Mapping[str, Any]) -> None:
        """Refuse a finished thing that another call made, by the parts that differ."""
        if record.get("call") != self.id:
            raise StoreExistsError(
                f"{target} exists and was made by another call or from another cube: "
                f"{self.unlike(record.get('call_parts', {}))}. Choose another path, or "
                "overwrite=True to replace it"
            )

    def unlike(self, earlier: Fields) -> str:
        """Name the parts in which an earlier call differs from this one; empty if none."""
        return in_words(differing(earlier, self.parts))


def shortened(fields: Fields) -> Fields:
    """Return fields in which a hash stands for each long value."""
    return {kind: {n: _short(v) for n, v in part.items()} for kind, part in fields.items()}


def _short(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _SHORT:
        return json.loads(text)
    return f"{HASHED}{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def differing(before: Fields, now: Fields) -> dict[str, dict[str, str]]:
    """Return the fields that differ, by kind and name, each in words."""
    differences: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys((*now, *before)):
        old, new = before.get(kind, {}), now.get(kind, {})
        changed = [n for n in dict.fromkeys((*new, *old)) if old.get(n) != new.get(n)]
        if changed:
            differences[kind] = {n: _changed(n, old.get(n), new.get(n)) for n in changed}
    return differences


def _changed(name: str, old: Any, new: Any) -> str:
    if str(old).startswith(HASHED) or str(new).startswith(HASHED):
        return name
    return f"{name} was {old!r} and is {new!r}"


def in_words(differences: Mapping[str, Mapping[str, str]]) -> str:
    """Return what `differing` found as one text."""
    texts = []
    for kind, part in differences.items():
        names = list(part.values())
        rest = names[_NAMES_SHOWN:]
        more = [f"and {len(rest)} more"] if len(rest) > 1 else rest
        texts.append(f"{kind}: {', '.join(names[:_NAMES_SHOWN] + more)}")
    return "; ".join(texts)
