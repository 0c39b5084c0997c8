"""Figures: each function returns a matplotlib Figure and shows or saves nothing.

Figures are made with the object interface, so they need no display and change no global state.
The colours are those of Okabe and Ito, which are distinct for people with colour blindness.
"""

from ml4cube.plotting.distances import distance_curves as distance_curves
from ml4cube.plotting.distances import leakage_figure as leakage_figure
from ml4cube.plotting.distances import variogram_plot as variogram_plot
from ml4cube.plotting.fields import field_maps as field_maps
from ml4cube.plotting.insights import plot_insights as plot_insights
from ml4cube.plotting.losses import loss_curve as loss_curve
from ml4cube.plotting.scorecards import scorecard_figure as scorecard_figure
from ml4cube.plotting.splits import fold_bars as fold_bars
from ml4cube.plotting.splits import split_map as split_map
from ml4cube.plotting.splits import split_timeline as split_timeline
