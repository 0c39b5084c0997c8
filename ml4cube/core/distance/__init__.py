"""Distances between cells, in steps of a grid.

`reach` finds cells too near to another part, `separation` the distance to the nearest train cell,
`variogram` the range of autocorrelation.
"""
