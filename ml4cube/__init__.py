"""From a geospatial data cube to a trained PyTorch model, and back to a cube.

The public names that need no torch; they are listed in ``__init__.pyi`` and imported when they are
first used, so that a worker process loads no more than it needs. What needs torch is imported from
its own module: `ml4cube.datasets.pytorch`, `ml4cube.training`, `ml4cube.prediction`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
