"""Splitters with scikit-learn's protocol.

Read `splitters` first, which cut blocks and time, and `place_folds`, which leave out regions and
locations; then `protocol`, their base class. `samples` finds the positions of samples in a cube.
"""
