"""The public names; `__init__.py` imports each when it is first used."""

from . import datasets as datasets
from . import errors as errors
from . import gap_filling as gap_filling
from . import insights as insights
from . import postprocessing as postprocessing
from . import preprocessing as preprocessing
from . import splits as splits
from .datasets.multiproc_sampler import MultiProcSampler as MultiProcSampler
from .datasets.store import open_store as open_store
from .datasets.xr_dataset import XrDataset as XrDataset
from .gap_filling import fill_gaps as fill_gaps
from .gap_filling import hide_cells as hide_cells
from .insights import get_insights as get_insights
from .postprocessing import undo_normalizing as undo_normalizing
from .postprocessing import undo_standardizing as undo_standardizing
from .preprocessing import CubeScaler as CubeScaler
from .preprocessing import Statistics as Statistics
from .preprocessing import apply_filter as apply_filter
from .preprocessing import assign_mask as assign_mask
from .preprocessing import drop_nan_values as drop_nan_values
from .preprocessing import fill_nan_values as fill_nan_values
from .preprocessing import get_range as get_range
from .preprocessing import get_statistics as get_statistics
from .preprocessing import normalize as normalize
from .preprocessing import standardize as standardize
from .splits import BlockKFold as BlockKFold
from .splits import BlockShuffleSplit as BlockShuffleSplit
from .splits import ForwardChaining as ForwardChaining
from .splits import LeakageReport as LeakageReport
from .splits import LeaveLocationOut as LeaveLocationOut
from .splits import LeaveLocationTimeOut as LeaveLocationTimeOut
from .splits import LeaveRegionOut as LeaveRegionOut
from .splits import apply_split as apply_split
from .splits import assign_block_split as assign_block_split
from .splits import assign_location_split as assign_location_split
from .splits import assign_rand_split as assign_rand_split
from .splits import assign_region_split as assign_region_split
from .splits import assign_time_split as assign_time_split
from .splits import audit as audit
from .splits import create_split as create_split
from .splits import estimate_range as estimate_range
from .splits import leakage_report as leakage_report
from .splits import suggest_block_size as suggest_block_size

__version__: str
