"""The errors that the package raises on purpose; every one is a `CrossbowError`."""

from __future__ import annotations

from crossbow_py.core.errors import (
    BadDataError,
    BadSampleError,
    BaseWrittenError,
    CentralModelError,
    CheckpointError,
    CrossbowError,
    DataError,
    DeviceLostError,
    LearnerError,
    NonFiniteError,
    RankError,
    RankLostError,
    SearchError,
    UnknownIdError,
    UserError,
)

__all__ = [
    "BadDataError",
    "BadSampleError",
    "BaseWrittenError",
    "CentralModelError",
    "CheckpointError",
    "CrossbowError",
    "DataError",
    "DeviceLostError",
    "LearnerError",
    "NonFiniteError",
    "RankError",
    "RankLostError",
    "SearchError",
    "UnknownIdError",
    "UserError",
]
