"""Open, describe and check the sample stores that `MultiProcSampler` writes."""

from ml4cube.store.format import open_axes as open_axes
from ml4cube.store.format import open_store as open_store
from ml4cube.store.format import verify_store as verify_store
from ml4cube.store.metadata import StoreMetadata as StoreMetadata
