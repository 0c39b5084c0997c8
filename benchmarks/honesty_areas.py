"""Areas of cells, and means weighted by them, against grids whose cells are known by formula.

Each cell of a grid is cut into many small ones, whose areas and values are added up. The weights
that ml4cube computes from the centres, or the bounds, must give the same mean within 1 %, and each
area away from edges and poles.

A part of `benchmarks/honesty.py`, which calls `keys`, `run` and `rows`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.evaluation import area_weights

Floats = NDArray[np.float64]
#: From positions (rows, columns) in a grid, 0 to its numbers of rows and columns, to degrees.
Formula = Callable[[Floats, Floats], tuple[Floats, Floats]]

_PARTS = 8  # of a cell, along each side
_TRIPOLAR_SOUTH, _CAP_ROWS = 135, 45  # rows of one degree from -75 to 60 degrees, and of the cap


def regular(row: Floats, column: Floats) -> tuple[Floats, Floats]:
    """Return positions of a global grid of 4 degrees."""
    return -90 + 4 * row, 4 * column


def stretched(row: Floats, column: Floats) -> tuple[Floats, Floats]:
    """Return positions of a region whose longitudes are not equally spaced."""
    return 20 + row, 10 + column + 0.02 * column**2


def gaussian(row: Floats, column: Floats) -> tuple[Floats, Floats]:
    """Return positions of a global Gaussian grid; edges of rows bound their Gaussian weights."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    whole, part = np.floor(row).astype(int).clip(0, 63), row - np.floor(row)
    edges = np.concatenate([[-1], np.cumsum(weights) - 1]).clip(-1, 1)
    edges[-1] = 1.0
    # the middle of a row is its node
    sine = np.where(part == 0.5, nodes[whole], edges[whole] + part * weights[whole])
    sine = np.where(row == 64, 1.0, sine)
    return np.rad2deg(np.arcsin(sine)), 360 / 128 * column


def rotated(row: Floats, column: Floats) -> tuple[Floats, Floats]:
    """Return positions of a region of Europe, whose north pole is at 39.25 N and 162 W."""
    return on_earth(*own_angles(row, column))


def own_angles(row: Floats, column: Floats) -> tuple[Floats, Floats]:
    """Return latitude and longitude of the rotated grid itself."""
    return -23.5 + 0.44 * row, -28.5 + 0.44 * column


def on_earth(lat: Floats, lon: Floats) -> tuple[Floats, Floats]:
    """Return positions on Earth of those on a grid with a rotated pole."""
    phi, theta, pole = np.deg2rad(lat), np.deg2rad(lon), np.deg2rad(39.25)
    sine = np.sin(pole) * np.sin(phi) + np.cos(pole) * np.cos(phi) * np.cos(theta)
    east = np.cos(phi) * np.sin(theta)
    north = np.sin(pole) * np.cos(phi) * np.cos(theta) - np.cos(pole) * np.sin(phi)
    return np.rad2deg(np.arcsin(sine)), 18 + np.rad2deg(np.arctan2(east, north))


def polar(row: Floats, column: Floats) -> tuple[Floats, Floats]:
    """Return positions of a polar stereographic grid of 100 km around the north pole."""
    x, y = 100e3 * (column - 38), 100e3 * (row - 56)
    distance = np.hypot(x, y)
    colatitude = 2 * np.arctan2(distance, 6371e3 * (1 + np.sin(np.deg2rad(70))))
    return 90 - np.rad2deg(colatitude), np.rad2deg(np.arctan2(x, -y)) - 45


def tripolar(row: Floats, column: Floats) -> tuple[Floats, Floats]:
    """Return positions of rows of latitude up to 60 N, and of a cap with two poles on that circle.

    In the stereographic plane z, the cap is a disc of radius r. The angle and the modulus of
    w = (r + z) / (r - z) are rows and columns, as in Murray (1996), Explicit generation of
    orthogonal grids for ocean models, Journal of Computational Physics 126.
    """
    lat, lon = -75 + row, 2 * column
    share = ((row - _TRIPOLAR_SOUTH) / _CAP_ROWS).clip(0, 1)
    half = np.deg2rad(lon.clip(1e-9, 360 - 1e-9)) / 2
    angle = np.where(lon <= 180, 1, -1) * np.pi / 2 * (1 - share)
    modulus = np.abs(1 / np.tan(half)).clip(1e-9, 1e9)
    w = modulus * np.exp(1j * angle)
    z = np.tan(np.deg2rad(15)) * (w - 1) / (w + 1)
    is_cap = row >= _TRIPOLAR_SOUTH
    lat = np.where(is_cap, 90 - 2 * np.rad2deg(np.arctan(np.abs(z))), lat)
    return lat, np.where(is_cap, np.rad2deg(np.angle(z)), lon)


#: Formula, rows and columns of each grid, and the rows whose single areas are not compared.
GRIDS: Mapping[str, tuple[Formula, int, int, tuple[int, ...]]] = {
    "regular": (regular, 45, 90, ()),
    "stretched": (stretched, 40, 50, ()),
    "gaussian": (gaussian, 64, 128, ()),
    "rotated": (rotated, 103, 106, ()),
    "polar stereographic": (polar, 112, 76, ()),
    "tripolar": (tripolar, _TRIPOLAR_SOUTH + _CAP_ROWS, 180, (134, 135, 178, 179)),
}


def sea_ice(lat: Floats, lon: Floats) -> Floats:
    """Return a share that is high near the poles, and differs between longitudes."""
    edge = 72 + 6 * np.cos(np.deg2rad(lon - 40))
    return 1 / (1 + np.exp((edge - np.abs(lat)) / 2))


def exact_cells(formula: Formula, rows: int, columns: int) -> tuple[Floats, Floats]:
    """Return area and mean of `sea_ice` of each cell, from small plane parts of it."""
    row = np.linspace(0, rows, rows * _PARTS + 1)[:, None]
    column = np.linspace(0, columns, columns * _PARTS + 1)[None, :]
    lat, lon = formula(*np.broadcast_arrays(row, column))
    phi, theta = np.deg2rad(lat), np.deg2rad(lon)
    points = np.stack(
        [np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], axis=-1
    )
    one, other = points[1:, 1:] - points[:-1, :-1], points[1:, :-1] - points[:-1, 1:]
    area = np.linalg.norm(np.cross(one, other), axis=-1) / 2
    middle = points[1:, 1:] + points[:-1, :-1] + points[1:, :-1] + points[:-1, 1:]
    middle /= np.linalg.norm(middle, axis=-1, keepdims=True)
    values = sea_ice(
        np.rad2deg(np.arcsin(middle[..., 2])),
        np.rad2deg(np.arctan2(middle[..., 1], middle[..., 0])),
    )
    parts = (rows, _PARTS, columns, _PARTS)
    areas = area.reshape(parts).sum((1, 3))
    return areas, (area * values).reshape(parts).sum((1, 3)) / areas


def cube_of(name: str, form: str, values: Floats) -> xr.Dataset:
    """Return a cube of values on a grid, with the coordinates that a file of the form has."""
    formula, rows, columns, _ = GRIDS[name]
    row, column = np.arange(rows) + 0.5, np.arange(columns) + 0.5
    grid = np.broadcast_arrays(row[:, None], column[None, :])
    lat, lon = formula(*grid)
    if form == "axes":
        of_axes = own_angles if name == "rotated" else formula
        names = ("rlat", "rlon") if name == "rotated" else ("lat", "lon")
        axes = of_axes(*grid)
        coords = {names[0]: axes[0][:, 0], names[1]: axes[1][0]}
        return xr.Dataset({"ice": (names, values)}, coords)
    if form == "land":
        is_land = np.hypot(*np.meshgrid(column % 40 - 20, row % 30 - 15)) < 9
        lat, lon = (np.where(is_land, np.nan, angle) for angle in (lat, lon))
        values = np.where(is_land, np.nan, values)
    ds = xr.Dataset(
        {"ice": (("y", "x"), values)}, {"lat": (("y", "x"), lat), "lon": (("y", "x"), lon)}
    )
    if form == "vertices":
        corners = [formula(grid[0] + dy, grid[1] + dx) for dy, dx in _CORNERS]
        for angle, of_corners in zip(("lat", "lon"), zip(*corners, strict=True), strict=True):
            ds[f"{angle}_vertices"] = ("y", "x", "vertex"), np.stack(of_corners, axis=-1)
            ds[angle].attrs["bounds"] = f"{angle}_vertices"
    return ds


_CORNERS = ((-0.5, -0.5), (-0.5, 0.5), (0.5, 0.5), (0.5, -0.5))
_FORMS = ("axes", "centres", "vertices", "land")


def keys() -> list[str]:
    """Return each grid with each form of its coordinates."""
    with_axes = ("regular", "stretched", "gaussian", "rotated")
    return [
        f"{name}, {form}"
        for name in GRIDS
        for form in _FORMS
        if form != "axes" or name in with_axes
    ]


def run(key: str) -> dict[str, Any]:
    """Return exact and weighted mean in percent, and the largest errors of single areas."""
    name, form = key.split(", ")
    formula, rows, columns, left_out = GRIDS[name]
    areas, values = exact_cells(formula, rows, columns)
    cube = cube_of(name, form, values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = area_weights(cube)
    weights = xr.broadcast(found, cube["ice"])[0].transpose(*cube["ice"].dims).values
    is_known = np.isfinite(cube["ice"].values)
    exact = (areas * values)[is_known].sum() / areas[is_known].sum()
    mean = (weights * values)[is_known].sum() / weights[is_known].sum()
    lat = formula(*np.meshgrid(np.arange(rows) + 0.5, np.arange(columns) + 0.5, indexing="ij"))[0]
    equal = values[is_known].mean()
    cosine = np.cos(np.deg2rad(lat))
    is_inner = _far_from_edges(is_known) & (np.abs(lat) < 85)
    is_inner[list(left_out)] = False
    if name == "tripolar":  # whose poles are in columns 0 and 90
        is_inner[_TRIPOLAR_SOUTH:, :6] = is_inner[_TRIPOLAR_SOUTH:, 84:96] = False
        is_inner[_TRIPOLAR_SOUTH:, 174:] = False
    ratio = weights * areas[is_inner].sum() / weights[is_inner].sum() / areas
    return {
        "exact": float(100 * exact),
        "mean": float(100 * mean),
        "equal": float(100 * equal),
        "cosine": float(100 * (cosine * values)[is_known].sum() / cosine[is_known].sum()),
        "largest_error": float(np.abs(ratio[is_inner] - 1).max()),
        "rule": found.attrs["long_name"],
    }


def _far_from_edges(is_known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the cells whose neighbours up to two cells away are known."""
    padded = np.pad(is_known, 2)
    rows, columns = is_known.shape
    return np.logical_and.reduce(
        [padded[i : i + rows, j : j + columns] for i in range(5) for j in range(5)]
    )


def rows(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each grid and bar."""
    table = []
    for name in GRIDS:
        of_grid = [result for key, result in results.items() if key.startswith(f"{name}, ")]
        if not of_grid:
            continue
        means = [abs(one["mean"] / one["exact"] - 1) for one in of_grid]
        single = [one["largest_error"] for one in of_grid]
        worst = of_grid[int(np.argmax(means))]
        table += [
            {
                "claim": f"area-weighted mean on a {name} grid",
                "bar": "within 1 % of the exact mean, in every form of the coordinates",
                "measured": f"{100 * max(means):.2f} %: {worst['mean']:.4g} for "
                f"{worst['exact']:.4g} (cosine {worst['cosine']:.4g})",
                "met": max(means) <= 0.01,
            },
            {
                "claim": f"areas of cells of a {name} grid",
                "bar": "within 1 % of the exact area, away from edges and poles",
                "measured": f"{100 * max(single):.2f} %",
                "met": max(single) <= 0.01,
            },
        ]
    return table
