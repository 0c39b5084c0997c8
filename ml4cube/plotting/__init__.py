"""Figures: each function draws into the axes it is given, or into a new figure, and returns it.

Nothing is shown or saved, and no global state is changed; figures need no display. All are drawn in
one style (`style`), maps by one module (`maps`): the aspect of their place, names and units by
their CF attributes, robust limits, and colours that people with colour blindness can tell apart.
"""

from ml4cube.plotting.density import sample_density as sample_density
from ml4cube.plotting.distances import distance_curves as distance_curves
from ml4cube.plotting.distances import leakage_figure as leakage_figure
from ml4cube.plotting.distances import variogram_plot as variogram_plot
from ml4cube.plotting.fields import difference_map as difference_map
from ml4cube.plotting.fields import error_maps as error_maps
from ml4cube.plotting.fields import field_map as field_map
from ml4cube.plotting.fields import field_maps as field_maps
from ml4cube.plotting.fields import time_maps as time_maps
from ml4cube.plotting.insights import plot_insights as plot_insights
from ml4cube.plotting.losses import loss_curve as loss_curve
from ml4cube.plotting.scorecards import scorecard_figure as scorecard_figure
from ml4cube.plotting.spectra import spectrum_plot as spectrum_plot
from ml4cube.plotting.splits import fold_bars as fold_bars
from ml4cube.plotting.splits import split_map as split_map
from ml4cube.plotting.splits import split_timeline as split_timeline
