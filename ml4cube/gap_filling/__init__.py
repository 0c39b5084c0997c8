"""Fill gaps, and measure the error of filling on artificial gaps.

Read `filling`, then `methods` and `artificial`.
"""

from ml4cube.gap_filling.filling import FilledCube as FilledCube
from ml4cube.gap_filling.filling import fill_gaps as fill_gaps
from ml4cube.gap_filling.filling import hide_cells as hide_cells
