"""Splitters with scikit-learn's protocol.

`protocol` is what all have in common, `splitters` are the four, `samples` says where samples lie in
a cube.
"""
