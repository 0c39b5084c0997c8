"""Report whether the test score of a split will hold where the model is used.

Read `report` first, which calls all others, then `checks`, which turns measurements into rows,
findings and a verdict. `label_layout` measures the label, `duplicates` and `carried_forward`
compare values, `deployment` measures distances to train, and `stores` compares two sample stores.
"""
