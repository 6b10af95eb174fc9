"""tierfall as storage for ``torch.distributed.checkpoint``: DCP's plans are saved to and loaded from tierfall's tiers.

dcp.save(state, storage_writer=TierWriter(ckpt, step=100))
dcp.async_save(state, storage_writer=TierWriter(ckpt, step=100), async_stager=LazyStager(ckpt))
dcp.load(state, storage_reader=TierReader(ckpt))
"""

from tierfall.integrations.dcp.planning import TierSavePlanner
from tierfall.integrations.dcp.reader import TierReader
from tierfall.integrations.dcp.writer import LazyStager, TierWriter

__all__ = ["LazyStager", "TierReader", "TierSavePlanner", "TierWriter"]
