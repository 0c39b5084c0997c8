"""Statistics, scaling, masks and gaps: a cube in, a cube out."""

from ml4cube.preprocessing.counts import accounting as accounting
from ml4cube.preprocessing.gaps import apply_filter as apply_filter
from ml4cube.preprocessing.gaps import assign_mask as assign_mask
from ml4cube.preprocessing.gaps import drop_nan_values as drop_nan_values
from ml4cube.preprocessing.gaps import fill_nan_values as fill_nan_values
from ml4cube.preprocessing.samples import Samples as Samples
from ml4cube.preprocessing.scaler import CubeScaler as CubeScaler
from ml4cube.preprocessing.scaling import normalize as normalize
from ml4cube.preprocessing.scaling import standardize as standardize
from ml4cube.preprocessing.statistics import Statistics as Statistics
from ml4cube.preprocessing.statistics import get_range as get_range
from ml4cube.preprocessing.statistics import get_statistics as get_statistics
