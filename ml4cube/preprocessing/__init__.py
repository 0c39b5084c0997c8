"""Statistics, scaling, masks and gaps: a cube in, a cube out."""

from ml4cube.preprocessing.scaling import normalize as normalize
from ml4cube.preprocessing.scaling import standardize as standardize
from ml4cube.preprocessing.statistics import Statistics as Statistics
from ml4cube.preprocessing.statistics import get_range as get_range
from ml4cube.preprocessing.statistics import get_statistics as get_statistics
