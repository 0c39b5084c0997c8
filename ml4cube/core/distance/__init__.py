"""Distances between cells, in steps of a grid.

`buffer` finds cells that lie too near to another part, `separation` the nearest train cell of each,
`variogram` how values become less alike with distance.
"""
