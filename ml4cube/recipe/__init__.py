"""The recipe of samples: the same cells become the same inputs in training and in prediction.

Read `recipe` (what a user chose, for any cube) and `bound` (the same on one cube), `roles` (what
the arrays of a sample are), `preparation` (cells masked, filled and scaled), `windows` (cut out of
a box of cells), then `placer` (results of windows put back into cells).
"""
