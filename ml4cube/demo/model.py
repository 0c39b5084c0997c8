"""The network of the demo, and a loss for fields with gaps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout2d, gelu, pad

CHANNELS = 24
# Learned maps of the location, which the network gets beside the features.
MAPS = 4
DILATIONS = (2, 4, 6)
DROPOUT = 0.1


class Downscaler(nn.Module):
    """Three dilated convolutions, cyclic in longitude, and learned maps of the location."""

    def __init__(self, inputs: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.maps = nn.Parameter(0.1 * torch.randn(MAPS, *shape))
        widths = [inputs + MAPS, *[CHANNELS] * (len(DILATIONS) - 1), 1]
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, dilation=dilation)
            for before, after, dilation in zip(widths, widths[1:], DILATIONS, strict=False)
        )
        # Training starts from the baseline, which adds nothing to the mean detail.
        last = self.layers[-1]
        assert isinstance(last, nn.Conv2d)
        assert last.bias is not None
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map features (batch, feature, latitude, longitude) to detail (batch, 1, ...)."""
        x = torch.nan_to_num(x)
        x = torch.cat([x, self.maps.expand(len(x), -1, -1, -1)], dim=1)
        for number, (layer, width) in enumerate(zip(self.layers, DILATIONS, strict=True), 1):
            x = pad(x, (width, width, 0, 0), mode="circular")
            x = layer(pad(x, (0, 0, width, width), mode="replicate"))
            if number < len(self.layers):
                x = dropout2d(gelu(x), DROPOUT, self.training)
        return x


def sea_mse(predicted: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error over the cells whose truth is not a gap."""
    sea = torch.isfinite(truth)
    return ((predicted - truth)[sea] ** 2).mean()
