"""Models that predict the change since the last step of their input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.loading.tensors import PTXrDataset
from ml4cube.training.inputs.checks import check_model
from ml4cube.training.inputs.rollout import check_same_cells, lead_dim, shared_channels

__all__ = ["Residual"]


class Residual(nn.Module):
    """A model whose network predicts by how much targets change since the last step of X.

    The change is added to the last step, so the output is the targets themselves: training,
    `rollout`, metrics and `predict_cube` need no further setting. A network of zeros is the
    forecast of persistence.

    Parameters
    ----------
    model : torch.nn.Module
        The network. It gets X (samples, channels, *window) and returns the change, of the shape
        of y in one step.
    data : PTXrDataset
        Data set with `target_offset` along time, which knows the channels. Targets that are not
        among the features are predicted as they are.

    Raises
    ------
    InvalidTypeError
        If `model` is not a module, or `data` not a PTXrDataset.
    InvalidValueError
        If the targets do not lie later than the inputs, in the same cells otherwise, or none of
        them is a feature.

    Notes
    -----
    A variable has one scaling as feature and as target, so the change is that of scaled values.
    Where a `CubeScaler` has a climatology, it is the change of the anomaly from the climatology
    of each date, and zeros are the forecast of anomaly persistence. If y has several cells along
    time, each is a change since the last step of X. Gaps of X stay gaps of the output, so fill
    features that have some. The names in ``state_dict()`` start with ``model.``.

    Examples
    --------
    >>> import numpy as np
    >>> import xarray as xr
    >>> cube = xr.Dataset({"t": ("time", np.arange(4.0)), "sun": ("time", np.ones(4))})
    >>> data = PTXrDataset(cube, to_pred="t", target_offset={"time": 1}, scale_fn=None)
    >>> network = nn.Linear(2, 1)
    >>> _ = nn.init.zeros_(network.weight), nn.init.ones_(network.bias)
    >>> x, y = data.take([0, 1, 2])
    >>> Residual(network, data)(x).flatten().tolist(), y.flatten().tolist()
    ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    """

    _x_channels: Tensor
    _y_channels: Tensor

    def __init__(self, model: nn.Module, data: PTXrDataset) -> None:
        super().__init__()
        check_model(model)
        if not isinstance(data, PTXrDataset):
            raise InvalidTypeError(f"data must be a PTXrDataset, got a {type(data).__name__}")
        dim = lead_dim(data)
        check_same_cells(data, dim)
        # Axes of time in X and y, in which they may lack.
        self._axes = [_axis(dim, sizes) for sizes in data.step_sizes[:2]]
        self._targets = len(data.targets)
        for name, channels in zip("xy", shared_channels(data), strict=True):
            # Not persistent, so that the state is that of the network.
            self.register_buffer(f"_{name}_channels", torch.tensor(channels), persistent=False)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the last step of X plus the change that the network predicts.

        Parameters
        ----------
        x : torch.Tensor, shape (samples, channels, *window)
            The features.

        Returns
        -------
        torch.Tensor, shape (samples, targets, *window)
            The targets, in the dtype that holds both X and the change.
        """
        change: Tensor = self.model(x)
        x_axis, y_axis = self._axes
        last = x
        if x_axis is not None:
            last = x.select(x_axis, -1)
        last = last.index_select(1, self._x_channels)
        n_axes = last.ndim + (y_axis is not None)
        if change.ndim != n_axes or change.shape[1] != self._targets:
            raise InvalidValueError(
                f"the model must return the change of {self._targets} targets, of shape (samples, "
                f"{self._targets}, ...) with {n_axes} axes, got {tuple(change.shape)}"
            )
        if y_axis is not None:
            last = torch.stack([last] * change.shape[y_axis], y_axis)
        dtype = torch.promote_types(change.dtype, last.dtype)  # half precision under autocast
        return change.to(dtype).index_add(1, self._y_channels, last.to(dtype))


def _axis(dim: str, sizes: Mapping[str, int]) -> int | None:
    """Return the axis of a dim in batches with windows of these sizes; None without it."""
    return 2 + list(sizes).index(dim) if dim in sizes else None
