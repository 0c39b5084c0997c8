"""From a geospatial data cube to a trained PyTorch model, and back to a cube.

The public names that need no torch. What does is imported from its own module:
`ml4cube.datasets.pytorch`, `ml4cube.training`, `ml4cube.prediction`.
"""

from ml4cube import errors as errors
from ml4cube.datasets.multiproc_sampler import MultiProcSampler as MultiProcSampler
from ml4cube.datasets.store import open_store as open_store
from ml4cube.datasets.xr_dataset import XrDataset as XrDataset
from ml4cube.postprocessing import undo_normalizing as undo_normalizing
from ml4cube.postprocessing import undo_standardizing as undo_standardizing
from ml4cube.preprocessing import CubeScaler as CubeScaler
from ml4cube.preprocessing import Statistics as Statistics
from ml4cube.preprocessing import apply_filter as apply_filter
from ml4cube.preprocessing import assign_mask as assign_mask
from ml4cube.preprocessing import drop_nan_values as drop_nan_values
from ml4cube.preprocessing import fill_nan_values as fill_nan_values
from ml4cube.preprocessing import get_range as get_range
from ml4cube.preprocessing import get_statistics as get_statistics
from ml4cube.preprocessing import normalize as normalize
from ml4cube.preprocessing import standardize as standardize
from ml4cube.splits import apply_split as apply_split
from ml4cube.splits import assign_block_split as assign_block_split
from ml4cube.splits import assign_rand_split as assign_rand_split
from ml4cube.splits import assign_region_split as assign_region_split
from ml4cube.splits import assign_time_split as assign_time_split
from ml4cube.splits import create_split as create_split

__version__ = "0.1.0"
