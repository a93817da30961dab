"""The page that the replica and its publisher share: until when the replica leads which shard, and in which
epoch.

The publisher looks at it before every send. A message through the pipe would not do: a publisher that stood
still for a while would first read what was true when it was written.
"""

import mmap
import os

SHARDS_MAX = 1_024
_PAGE_BYTES = 8 * SHARDS_MAX
_EPOCH_BITS = 16
_MS_MAX = float(1 << 47)


class FencePage:
    """One word a shard, written and read whole: the end of the lease in milliseconds, and the lowest bits of
    the epoch. Two words could be read half old, half new."""

    def __init__(self, descriptor: int) -> None:
        """Takes over `descriptor`. Raises OSError when it is no such page."""
        self._descriptor = descriptor
        self._page = mmap.mmap(descriptor, _PAGE_BYTES)
        self._words = memoryview(self._page).cast("Q")

    @classmethod
    def make(cls) -> "FencePage":
        """A new page: nothing is led. Raises OSError."""
        descriptor = os.memfd_create("ucm-fence", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _PAGE_BYTES)
        return cls(descriptor)

    @property
    def descriptor(self) -> int:
        """To be handed to the publisher."""
        return self._descriptor

    def set(self, shard: int, epoch: int, until_s: float) -> None:
        """The shard is led in `epoch` until `until_s` of the clock of leases; 0.0: it is not led; infinity:
        nobody else ever leads."""
        if not 0 <= shard < SHARDS_MAX:
            raise ValueError(f"shard {shard} is not in 0..{SHARDS_MAX - 1}")
        until_ms = int(min(max(until_s * 1000, 0.0), _MS_MAX))
        self._words[shard] = until_ms << _EPOCH_BITS | epoch & (1 << _EPOCH_BITS) - 1

    def holds(self, shard: int, epoch: int, now_s: float) -> bool:
        """Whether the shard is led now, and in this epoch."""
        word = self._words[shard]
        return now_s * 1000 < word >> _EPOCH_BITS and (word ^ epoch) & (1 << _EPOCH_BITS) - 1 == 0

    def close(self) -> None:
        """Once."""
        self._words.release()
        self._page.close()
        os.close(self._descriptor)
