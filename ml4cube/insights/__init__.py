"""What a cube holds: gaps, distribution, season, correlation, range of autocorrelation, chunks.

Read `overview`, then `sums`, which makes the one pass over the cells, and `chunks`.
"""

from ml4cube.insights.overview import get_insights as get_insights
