"""Windows over a cube: which the model was trained on, where they lie, and how they are blended.

Read `geometry`, then `placing` (with `dates` for forecasts), then `blending`.
"""
