"""Windows over a cube: which the model was trained on, and where they lie.

Read `geometry`, then `placing` (with `dates` for forecasts).
"""
