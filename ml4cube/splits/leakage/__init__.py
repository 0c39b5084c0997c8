"""Report what was copied from train, and how near the test part is to it.

Read `report` first, which calls all others, then `checks`, which turns measurements into rows,
findings and a verdict. `label_layout` measures the label, `duplicates` and `carried_forward`
compare values, `deployment` measures distances to train, `expected_error` says what they do to the
error, and `stores` compares two sample stores.
"""
