"""Is this the same call? What may be replaced? How does it appear whole, or not at all?

`call` says what identifies a call. A place for files is a `Folder` (`folders`): on disk (`local`),
behind a URL (`remote`) or in a zarr store (`in_zarr`); `locations` chooses among them. The `draft`
of a store that will be there is locked by one run, resumed by the same call and published whole;
`manifest` lists the files of a store. No cube, sample or model is known here.
"""
