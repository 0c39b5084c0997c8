"""Metadata of a sample store: what its samples are, and where they come from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ml4cube.core.display import Summarized, Summary
from ml4cube.core.errors import StoreError
from ml4cube.core.missing import FILLED_ATTR
from ml4cube.core.sample_facts import outcome_table, split_text, variable_facts
from ml4cube.core.scaling import Entries, decode_entries, encode_entries
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.fitted import FittedRecipe
from ml4cube.recipe.recipe import Recipe
from ml4cube.store.format import check_format, read_attributes

# Optional attributes of a store.
_FILL_ATTR = "fill_statistics"
_PLACES_ATTR = "scaling_places"
_MISSING_DATES_ATTR = "windows_over_missing_dates"


@dataclass(frozen=True, repr=False)
class StoreMetadata(Summarized):
    """Metadata of a sample store.

    Parameters
    ----------
    part : {"train", "test", "val"}
        Part of the cube.
    bound : BoundRecipe
        How samples were cut, and how their gaps were treated.
    statistics : Statistics
        Statistics that scaled the samples: of the float variables of the train part before scaling,
        or those given to the sampler.
    accounting : dict of str to int
        ``total``, samples of each part, and dropped windows by reason; parts and reasons add up to
        the total.
    split : dict
        Recipe that rebuilds the split label.
    provenance : dict
        Source, attributes of the cube and its variables, settings, library versions.
    variables : tuple of str
        Stored variables, in order.
    fill : Statistics, optional
        Statistics of the raw train cells that fill gaps; None where none do, and for stores of
        older versions.
    filled : dict of str to str
        Variables with filled gaps, and the method.
    places : mapping of str to tuple
        For variables whose scaling varies: the entry of `statistics` for each cell of the cube.
    over_missing_dates : int
        Windows of several time steps that span missing dates; they are also counted in
        `accounting`, by part or reason. The attribute ``windows_over_missing_dates``, if there are
        any.
    """

    part: str
    bound: BoundRecipe
    statistics: Statistics
    accounting: Mapping[str, int]
    split: Mapping[str, Any]
    provenance: Mapping[str, Any]
    variables: tuple[str, ...]
    fill: Statistics | None = None
    filled: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Entries] = field(default_factory=dict)
    over_missing_dates: int = 0

    @property
    def recipe(self) -> Recipe:
        """How samples were cut, which holds for other cubes too."""
        return self.bound.recipe

    @property
    def fitted(self) -> FittedRecipe:
        """Recipe and statistics of the samples, by which other cubes become the same inputs."""
        described = self.provenance.get("variables", {})
        variables = {name: described.get(name, {}) for name in self.variables}
        recipe = replace(self.recipe, features=self.features)
        return FittedRecipe(recipe, self.statistics, self.fill, variables)

    @property
    def features(self) -> tuple[str, ...]:
        """Variables to predict from: as requested, or all stored ones that are not targets."""
        if self.recipe.features is not None:
            return self.recipe.features
        return tuple(name for name in self.variables if name not in self.recipe.targets)

    @property
    def targets(self) -> tuple[str, ...]:
        """Variables to predict; empty if none was named."""
        return self.recipe.targets

    def _summary(self) -> Summary:
        """Return what the samples are, and what became of all windows."""
        return Summary(
            f"{self.accounting[self.part]:,} {self.part} samples",
            store_facts(self, self.features, self.targets),
            {
                "Windows": outcome_table(
                    self.accounting, [p for p in PARTS if p in self.accounting]
                ),
                "Statistics": self.statistics,
            },
        )

    def invented(self, names: Iterable[str]) -> dict[str, str]:
        """Return variables to predict whose gaps were filled without being named.

        Parameters
        ----------
        names : iterable of str
            Variables to predict, or weights.

        Returns
        -------
        dict of str to str
            How their gaps were filled, in the cube or by the sampler.
        """
        described = self.provenance.get("variables", {})
        methods = {}
        for name in names:
            in_cube = described.get(name, {}).get("attrs", {}).get(FILLED_ATTR)
            if in_cube or (name in self.filled and name not in self.targets):
                methods[name] = str(in_cube or self.filled[name])
        return methods

    @classmethod
    def of(cls, source: Any) -> StoreMetadata:
        """Read a store's metadata.

        Parameters
        ----------
        source : Dataset, str, path, zarr store or group, or Icechunk session
            The store, opened or not.

        Returns
        -------
        StoreMetadata
            The metadata.

        Raises
        ------
        StoreError
            If `source` has no metadata of a sample store.
        """
        attrs: Mapping[str, Any] = read_attributes(source)
        if "ml4cube_format" in attrs:
            check_format("the store", attrs)
        attrs = {name: _parsed(value) for name, value in attrs.items()}
        try:
            return cls(
                part=attrs["part"],
                bound=BoundRecipe.from_json(json.dumps(attrs["spec"])),
                statistics=_statistics(attrs["statistics"]),
                accounting=dict(attrs["accounting"]),
                split=attrs["split"],
                provenance=attrs["provenance"],
                variables=tuple(attrs["variables"]),
                fill=_statistics(attrs[_FILL_ATTR]) if _FILL_ATTR in attrs else None,
                filled=dict(attrs.get("filled", {})),
                places={n: decode_entries(p) for n, p in attrs.get(_PLACES_ATTR, {}).items()},
                over_missing_dates=attrs.get(_MISSING_DATES_ATTR, 0),
            )
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"source is not a sample store of MultiProcSampler: its attributes lack {error}"
            ) from error

    def to_attrs(self) -> dict[str, Any]:
        """Return the store's attributes, as JSON values.

        Returns
        -------
        dict
            The attributes that `of` reads.
        """
        attrs = {
            "part": self.part,
            "variables": list(self.variables),
            "spec": json.loads(self.bound.to_json()),
            "statistics": json.loads(self.statistics.to_json()),
            "accounting": dict(self.accounting),
            "split": dict(self.split),
            "provenance": dict(self.provenance),
            "filled": dict(self.filled),
        }
        if self.fill is not None:
            attrs[_FILL_ATTR] = json.loads(self.fill.to_json())
        if self.places:
            attrs[_PLACES_ATTR] = {n: encode_entries(e) for n, e in self.places.items()}
        if self.over_missing_dates:
            attrs[_MISSING_DATES_ATTR] = self.over_missing_dates
        return attrs


def store_facts(
    metadata: StoreMetadata, features: Collection[str], targets: Collection[str]
) -> dict[str, object]:
    """Return what the samples of a store are, used with these variables, by label."""
    described = metadata.provenance.get("variables", {})
    units = {
        name: description.get("attrs", {}).get("units") for name, description in described.items()
    }
    return {
        **variable_facts(features, targets, units),
        "Cube": metadata.bound.sizes,
        **metadata.recipe.facts,
        "Scaling": metadata.recipe.scale_fn or "none",
        "Split": split_text(metadata.split),
        "Cut from": metadata.provenance.get("source"),
    }


def _parsed(value: Any) -> Any:
    """Return an attribute as it was before it became JSON, as for netCDF, which has no mappings."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _statistics(values: Any) -> Statistics:
    return Statistics.from_json(json.dumps(values))
