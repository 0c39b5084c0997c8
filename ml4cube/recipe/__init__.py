"""The recipe of samples: the same cells become the same inputs in training and in prediction.

Read `recipe` (what a user chose, for any cube), `fitted` (with the statistics of a training) and
`bound` (on one cube), `roles` (what the arrays of a sample are), `preparation` (cells masked,
filled and scaled), then `windows` (cut out of a box of cells, and put back into it).
"""
