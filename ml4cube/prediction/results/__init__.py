"""What a model returns, and the predicted cube that it becomes.

Read `layout` (names and dims of results), `finishing` (values in physical units), then `template`
and `cf` (the cube before its values).
"""
