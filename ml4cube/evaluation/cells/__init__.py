"""What is compared: values of predictions, truth and baselines at the same dates and cells.

Read `timing` and `cell_reader`, then `predicted` and `baselines`, then `labels`.
"""
