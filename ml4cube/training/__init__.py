"""One training loop and its faces: on one device, and on as many ranks as torchrun starts."""

from ml4cube.core.errors import needs_torch

with needs_torch("ml4cube.training"):
    import torch as torch
