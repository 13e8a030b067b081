"""A worker's pool of KV in the memory of its GPU."""

from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.memory import Blocks, Pool, Region, boot_id
from kvtransfer.messages import IpcOffer


class DevicePool:
    """A pool in a GPU's memory, owned by the runner."""

    blocks = None

    def __init__(self, device: DeviceBlocks, device_id: int) -> None:
        self.device = device
        self.num_blocks = device.num_blocks
        self.block_bytes = device.block_bytes
        num_bytes = device.num_blocks * device.block_bytes
        self._region = Region(device.address, num_bytes, "VRAM", device_id)

    def region(self) -> Region:
        """The pool on its device."""
        return self._region

    def offer(self) -> None:
        """No process can map it as host memory."""

    def ipc_offer(self) -> IpcOffer:
        """Returns what another worker of this host needs to map it. Raises DriverError."""
        shared = self.device.driver.share(self._region.address)
        return IpcOffer(boot_id(), shared.handle, shared.offset, self._region.num_bytes)


def reach(pool: Pool) -> Blocks | DeviceBlocks | None:
    """Returns a pool as the endpoint copies from and to it; None if it cannot."""
    return pool.device if isinstance(pool, DevicePool) else pool.blocks
