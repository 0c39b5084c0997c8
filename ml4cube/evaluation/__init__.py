"""Scores of predictions: sums that merge, exact on any number of blocks or ranks."""

from ml4cube.evaluation.comparison import evaluate as evaluate
from ml4cube.evaluation.cube_scores import area_weights as area_weights
from ml4cube.evaluation.cube_scores import score_cube as score_cube
from ml4cube.evaluation.scorecard import Scorecard as Scorecard
