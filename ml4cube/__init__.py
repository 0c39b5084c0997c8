"""From a geospatial data cube to a trained PyTorch model, and back to a cube."""

__version__ = "0.1.0"
