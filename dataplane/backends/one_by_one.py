"""Many places at a time, for backends that do them one by one on a few threads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dataplane.batch import Batch, kept
from dataplane.port import Buffer, DeleteFailed, Place, ReadRefused, WriteFailed


class OneByOne(ABC):
    """The `*_many` half of `port.Backend` over the calls for one place, whose contract is there too."""

    def __init__(self, threads: int, name: str) -> None:
        self._batch = Batch(threads, name)

    @abstractmethod
    def write(self, place: Place, data: Buffer) -> int: ...

    @abstractmethod
    def read(self, place: Place, checksum: int | None = None) -> bytes: ...

    @abstractmethod
    def read_into(
        self, place: Place, buffer: bytearray | memoryview, checksum: int | None = None
    ) -> None: ...

    @abstractmethod
    def delete(self, place: Place) -> bool: ...

    def write_many(self, places: Sequence[Place], data: Sequence[Buffer]) -> list[int | WriteFailed]:
        return self._batch.run(kept(self.write, WriteFailed), places, data)

    def read_many(
        self, places: Sequence[Place], checksums: Sequence[int] | None = None
    ) -> list[bytes | ReadRefused]:
        expected: Sequence[int | None] = [None] * len(places) if checksums is None else checksums
        return self._batch.run(kept(self.read, ReadRefused), places, expected)

    def read_many_into(
        self,
        places: Sequence[Place],
        buffers: Sequence[bytearray | memoryview],
        checksums: Sequence[int] | None = None,
    ) -> list[ReadRefused | None]:
        expected: Sequence[int | None] = [None] * len(places) if checksums is None else checksums
        return self._batch.run(kept(self.read_into, ReadRefused), places, buffers, expected)

    def delete_many(self, places: Sequence[Place]) -> list[bool | DeleteFailed]:
        return self._batch.run(kept(self.delete, DeleteFailed), places)

    def close(self) -> None:
        self._batch.close()
