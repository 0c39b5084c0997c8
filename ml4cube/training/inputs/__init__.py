"""Check the input of a run: options, batches and losses.

`options` are the settings of a run, `batches` reads what loaders give, `rollout` cuts it into the
steps of a forecast, `loss_functions` says what a loss divides by, `checks` refuses what cannot
work, `identity` tells data, losses and metrics of two runs apart. Nothing here knows of the loop.
"""
