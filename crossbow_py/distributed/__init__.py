"""Several ranks: processes, one a device, that train one model together."""

from crossbow_py.distributed.ranks import Ranks
from crossbow_py.distributed.settings import DistributedSettings

__all__ = ["DistributedSettings", "Ranks"]
