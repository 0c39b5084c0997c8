"""Does a split leak? The report and what it measures.

`report` judges, `layout` and `duplicates` look at the label and the values, `carried` at values
carried forward, `deployment` at distances, `stores` at two sample stores.
"""
