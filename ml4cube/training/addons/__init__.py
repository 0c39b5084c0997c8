"""Add-ons for `ml4cube.training.trainer.Trainer`, and the base class of your own."""

from ml4cube.training.addons.core import AddOnBase
from ml4cube.training.addons.mpu import MultiGPUAddon
from ml4cube.training.addons.precision import PrecisionMixerAddon
from ml4cube.training.addons.state_manager import StateManagerAddon
from ml4cube.training.addons.web_logger import NeptuneLoggerAddon, WandBLoggerAddon

__all__ = [
    "AddOnBase",
    "MultiGPUAddon",
    "NeptuneLoggerAddon",
    "PrecisionMixerAddon",
    "StateManagerAddon",
    "WandBLoggerAddon",
]
