"""The exceptions a caller may want to catch; all derive from `CubeError`."""

from ml4cube.core.errors import CubeError as CubeError
from ml4cube.core.errors import EmptyPartError as EmptyPartError
from ml4cube.core.errors import InvalidTypeError as InvalidTypeError
from ml4cube.core.errors import InvalidValueError as InvalidValueError
from ml4cube.core.errors import RunError as RunError
from ml4cube.core.errors import StoreError as StoreError
from ml4cube.core.errors import StoreExistsError as StoreExistsError
