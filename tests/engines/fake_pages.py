"""The fake engine's KV memory as the connector's workers see it: dataplane's Pages over bytearrays."""

from collections.abc import Callable

from dataplane.pages import GroupPages, Pages
from tests.engines.oracle import NULL, EngineBroken, Shape


class FakePages(Pages):
    """One rank's pages. `before_copy` is called, from the copier's thread, before each page is copied out: a
    slow device, or a wall to stop at."""

    def __init__(self, shape: Shape, memory: bytearray, blocks: int) -> None:
        self._memory = memoryview(memory)
        self._size = shape.page_bytes
        self._groups = tuple(
            GroupPages((f"layer.{group}",), shape.page_bytes, blocks) for group in shape.groups
        )
        self.before_copy: Callable[[], None] = lambda: None
        self.gathered = 0
        self.scattered = 0

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        return self._groups

    def fence(self) -> None:
        """Memory of the host: what was computed is there."""

    def gather(self, group: int, block: int, out: memoryview) -> None:
        self.before_copy()
        out[: self._size] = self._page(group, block)
        self.gathered += 1

    def scatter(self, group: int, block: int, data: memoryview) -> None:
        self._page(group, block)[:] = data[: self._size]
        self.scattered += 1

    def settle(self) -> None:
        """As `fence`."""

    def _page(self, group: int, block: int) -> memoryview:
        if block == NULL or not 0 <= block < self._groups[group].blocks:
            raise EngineBroken(f"block {block} of group {group} is nobody's")
        return self._memory[block * self._size : (block + 1) * self._size]
