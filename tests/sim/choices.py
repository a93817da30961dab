"""What the machine may choose freely within the rules: victims, storages. The model follows and checks."""

from metaservice.core.model import EvictionPolicy, Limits, LocationState, SwitchMode, SwitchScope

from .facts import Block, Scope
from .reads import Reads
from .rows import Copy, InstanceRow, Violation


class Choices(Reads):
    """Follows the machine's choices of one step."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.victims: list[int] = []
        """Locations that the machine said it evicted in this step and that no rule has asked for yet."""
        self.evicted = 0
        """How many of them were in this step."""
        self.retired: list[int] = []
        """Locations that left with their retiring instance in this step."""
        self.instances_gone: set[str] = set()
        self.changed_state = False
        """Whether the step has events."""
        self.seq = 0
        """The machine's seq after this step."""
        self.unwritten: list[tuple[int, int]] = []
        """(location, generation) that nobody may write any more since this step"""
        self.numbers: dict[int, str] = {}
        """storage number -> name"""

    # ------------------------------------------------------------ eviction

    def candidate(self, copy: Copy, keep: set[Block], now_ms: int) -> bool:
        """Whether the copy may be evicted: a durable leaf that serves, and that nobody holds or needs."""
        return (
            self.visible(copy)
            and (copy.instance, copy.group, copy.key) not in keep
            and not self.leased(copy, now_ms)
            and not self.children(copy)
            and self.evicts(self.state.instances[copy.instance].group)
        )

    def evict_one(self, scope: Scope, keep: set[Block], now_ms: int) -> bool:
        """One block of the scope goes, of the least recently used. False: there is no candidate."""
        candidates = [c for c in self.counted(scope) if c.live and self.candidate(c, keep, now_ms)]
        if not candidates:
            return False
        oldest_ms = min(self.used_at(c)[1] for c in candidates)
        allowed = {c.location: c for c in candidates if self.used_at(c)[0] <= oldest_ms}
        chosen = next((location for location in self.victims if location in allowed), None)
        if chosen is None:
            where = f"{scope[0].name} {scope[1]}"
            raise Violation(f"{where}: one of {sorted(allowed)} had to be evicted, victims {self.victims}")
        self.victims.remove(chosen)
        self.free(allowed[chosen], now_ms + self.limits.reclaim_delay_ms)
        return True

    def used_at(self, copy: Copy) -> tuple[int, int]:
        """The earliest and latest time of last use that a machine may believe in.

        They differ for what was used before the take-over, and where a block in the middle of a chain is
        gone: whether the use of what hangs below it still counts above is left open.
        """
        memory = self.memory
        earliest_ms = memory.own_ms.get(copy.location, 0)
        latest_ms = memory.used_ms.get(copy.location, self.state.took_over_ms)
        return earliest_ms, max(earliest_ms, latest_ms)

    def free(self, copy: Copy, not_before_ms: int) -> None:
        """The copy's key is free at once, its place only later."""
        if copy.state == LocationState.writing:
            self.unwritten.append((copy.location, copy.generation))
        self.pass_on(copy)
        self.state.copies[copy.location] = copy._replace(
            state=LocationState.deleting, session=0, seq=self.seq, not_before_ms=not_before_ms
        )

    def pass_on(self, copy: Copy) -> None:
        """What the copy needed was used when the copy was."""
        needed = self.live().get(self.needs(copy))
        own_ms = self.memory.own_ms
        if needed is not None and copy.location in own_ms:
            own_ms[needed.location] = max(own_ms.get(needed.location, 0), own_ms[copy.location])
        own_ms.pop(copy.location, None)
        self.memory.used_ms.pop(copy.location, None)

    # ------------------------------------------------------------ storages

    def usable(self, row: InstanceRow) -> list[str]:
        """The storages that new blocks of an instance may go to, in order."""
        return [name for name in self.state.groups[row.group].storages if self.takes(name)]

    def takes(self, name: str) -> bool:
        """Whether new blocks may go to a storage."""
        return self.mode(SwitchScope.storage, name) == SwitchMode.normal and (
            name in self.state.pools or not self.volatile(name)
        )

    def volatile(self, name: str) -> bool:
        """Whether the storage's bytes are gone with the worker that holds them."""
        return self.state.storages[name].kind == "shm"

    def storage_room(self, names: list[str], size_bytes: int) -> int:
        """How many more blocks of that size the storages take together."""
        return sum(self.fits((SwitchScope.storage, name), size_bytes) for name in names)

    def chosen_storage(self, row: InstanceRow, group: str, number: int) -> str:
        """The storage chosen for one more block: a usable one with room, the first such if nothing went."""
        size_bytes = row.block_bytes(group)
        roomy = [n for n in self.usable(row) if self.storage_room([n], size_bytes)]
        name = self.numbers.get(number)
        if name is None or name not in roomy:
            raise Violation(f"storage {number} ({name}) was chosen, there is room in {roomy}")
        if not self.evicted and name != roomy[0]:
            raise Violation(f"storage {name} was chosen before {roomy[0]}")
        return name

    def evicts(self, group: str) -> bool:
        """Whether blocks of an instance group may go to make room."""
        return self.state.groups[group].eviction == EvictionPolicy.lru
