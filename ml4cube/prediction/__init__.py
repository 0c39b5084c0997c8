"""Prediction of a cube with a trained model, on the original grid, in physical units."""

from ml4cube.core.errors import needs_torch

__all__ = ["predict_cube"]

with needs_torch("ml4cube.prediction"):
    from ml4cube.prediction.cube import predict_cube as predict_cube
