"""Splitters with scikit-learn's protocol.

Read `splitters` first, which has the four splitters, then `protocol`, their base class. `samples`
finds the positions of samples in a cube.
"""
