"""The network of the demo, and a loss for fields with gaps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, dropout2d, gelu, pad

from ml4cube.demo.downscaling import FACTOR

# Small networks that learn the same from other starting weights; their mean errs less than each.
MEMBERS = 3
CHANNELS = 24
# Learned maps of the location, which each member gets beside the features.
MAPS = 4
DILATIONS = (2, 4, 6)
DROPOUT = 0.1


class Downscaler(nn.Module):
    """Members of three dilated convolutions, cyclic in longitude, with maps of the location."""

    def __init__(self, inputs: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.maps = nn.Parameter(0.1 * torch.randn(MEMBERS, MAPS, *shape))
        widths = [inputs + MAPS, *[CHANNELS] * (len(DILATIONS) - 1), 1]
        self.layers = nn.ModuleList(
            nn.Conv2d(before * MEMBERS, after * MEMBERS, 3, dilation=dilation, groups=MEMBERS)
            for before, after, dilation in zip(widths, widths[1:], DILATIONS, strict=False)
        )
        # Training starts from the first guess, to which nothing is added.
        last = self.layers[-1]
        assert isinstance(last, nn.Conv2d)
        assert last.bias is not None
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map features (batch, feature, latitude, longitude) to detail (batch, 1, ...).

        In training, the detail of each member (batch, member, ...), so that each learns by itself.
        """
        x = torch.nan_to_num(x)[:, None].expand(-1, MEMBERS, -1, -1, -1)
        x = torch.cat([x, self.maps.expand(len(x), -1, -1, -1, -1)], dim=2).flatten(1, 2)
        for number, (layer, width) in enumerate(zip(self.layers, DILATIONS, strict=True), 1):
            x = pad(x, (width, width, 0, 0), mode="circular")
            x = layer(pad(x, (0, 0, width, width), mode="replicate"))
            if number < len(self.layers):
                x = dropout2d(gelu(x), DROPOUT, self.training)
        # The means of blocks are known.
        means = avg_pool2d(x, FACTOR)
        x = x - means.repeat_interleave(FACTOR, 2).repeat_interleave(FACTOR, 3)
        if self.training:
            return x
        return x.mean(1, keepdim=True)


def sea_mse(predicted: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error over the cells whose truth is not a gap."""
    truth = truth.expand_as(predicted)
    sea = torch.isfinite(truth)
    return ((predicted - truth)[sea] ** 2).mean()
