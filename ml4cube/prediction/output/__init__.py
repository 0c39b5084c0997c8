"""Where a predicted cube is written, block by block.

`memory` and `stored` are the two outputs, in memory or at a location, and `opening` makes one.
`files` says what a stored prediction is, `netcdf` converts one, `appending` adds steps to one.
"""
