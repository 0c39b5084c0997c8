"""Check the input of a run: options, batches and steps.

`options` are the settings of a run, `batches` reads what loaders give, `steps` says what a step is,
`loss_functions` what a loss divides by, `checks` refuses what cannot work, `identity` tells data,
losses and metrics of two runs apart. Nothing here knows of ranks or of the loop.
"""
