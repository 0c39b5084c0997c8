"""Splits: add a `split` label to a cube, with train, validation and test cells, and check it.

Read `assign` and `regions` first, which make labels, then `label`, which adds them to a cube with
their recipe. `cube`, `buffers`, `strata` and `validity` parse arguments; `block_sizes` and `ranges`
choose blocks. `folds/` has the splitters for scikit-learn, `leakage/` the leakage report, and
`to_arrays` turns a labelled cube into X and y.
"""

from ml4cube.splits.assign import assign_block_split as assign_block_split
from ml4cube.splits.assign import assign_rand_split as assign_rand_split
from ml4cube.splits.assign import assign_time_split as assign_time_split
from ml4cube.splits.folds.place_folds import LeaveLocationOut as LeaveLocationOut
from ml4cube.splits.folds.place_folds import LeaveLocationTimeOut as LeaveLocationTimeOut
from ml4cube.splits.folds.place_folds import LeaveRegionOut as LeaveRegionOut
from ml4cube.splits.folds.splitters import BlockKFold as BlockKFold
from ml4cube.splits.folds.splitters import BlockShuffleSplit as BlockShuffleSplit
from ml4cube.splits.folds.splitters import ForwardChaining as ForwardChaining
from ml4cube.splits.label import apply_split as apply_split
from ml4cube.splits.leakage.report import LeakageReport as LeakageReport
from ml4cube.splits.leakage.report import audit as audit
from ml4cube.splits.leakage.report import leakage_report as leakage_report
from ml4cube.splits.locations import assign_location_split as assign_location_split
from ml4cube.splits.ranges import Ranges as Ranges
from ml4cube.splits.ranges import estimate_range as estimate_range
from ml4cube.splits.ranges import suggest_block_size as suggest_block_size
from ml4cube.splits.regions import assign_region_split as assign_region_split
from ml4cube.splits.to_arrays import create_split as create_split
