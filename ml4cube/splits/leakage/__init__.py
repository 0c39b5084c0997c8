"""Report what was copied from train, and how near the test part is to it.

Read `report` first: it runs a table of checks, each of which adds rows and sentences to `findings`.
`case` opens and measures a labelled cube for them. `duplicates`, `carried_forward` and
`changed_copies` compare values, `separation` looks at the label, `deployment` at distances to
train, with `expected_error` for what they do to the error; `stores` compares two sample stores.
"""
