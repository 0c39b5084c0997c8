"""Train on several ranks.

`dist` joins or starts ranks, `environment` says which rank and device this process is, `world`
communicates, `messages` are failures and requests. `strategy` and `fsdp` distribute the model,
`shared_data` says which samples a rank gets, `engine` shares tasks out.
"""
