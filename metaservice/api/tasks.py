"""Deletion tasks over the wire: taken from every shard that is led here, or from the one that is named."""

import asyncio

from msgspec import Struct
from msgspec.structs import replace

from metaservice.core import commands, replies
from metaservice.core.rejections import Rejection
from metaservice.replica.errors import NotLeader
from metaservice.wire import schemas_members as wire

from . import convert, render
from .call import NOWHERE, Call, Table
from .errors import ApiError, taken
from .members import storage_ref
from .names import name
from .polls import LongPolls
from .port import CATALOGUE, ShardPort
from .routing import Routing

TURN_S = 0.05
"""How often a poll of several shards looks again."""
Answer = replies.Tasks | Rejection


class TaskHandlers:
    """Handing out deletions, their confirmation, and the question for places that nobody knows."""

    def __init__(self, routing: Routing, polls: LongPolls) -> None:
        self._routing = routing
        self._replica = routing.replica
        self._limits = routing.replica.limits
        self._polls = polls

    def table(self) -> Table:
        """The routes of tasks."""
        worker = "/v1/workers/{worker}"
        confirm = f"{worker}/tasks/{{task}}/confirm"
        yield "POST", f"{worker}/tasks", wire.TakeTasksRequest, wire.TakeTasksReply, self.take_tasks
        yield "POST", confirm, wire.ConfirmTaskRequest, wire.ConfirmTaskReply, self.confirm_task
        yield "POST", f"{worker}/unknown", wire.UnknownRequest, wire.UnknownReply, self.unknown_places
        self._turn = 0

    async def take_tasks(self, call: Call, body: wire.TakeTasksRequest) -> Struct:
        worker = name(call.segments[3], "worker")
        shards = self._asked(body.shard)
        command = commands.TakeTasks(worker=worker, incarnation=body.incarnation, limit=body.limit)
        wait_ms = self._polls.granted_ms(body.wait_ms)
        taking = self._take(call, shards, command, wait_ms)
        if wait_ms:
            # Neither past the service's stop nor for a worker that hung up: its tasks would be out for long.
            answer = await self._polls.until(call.request, taking, wait_ms) or replies.Tasks(tasks=[])
        else:
            answer = await taking
        tasks: replies.Tasks = taken(answer)
        found: list[wire.DeleteTask] = []
        for task in tasks.tasks:
            storage = storage_ref(self._routing.task(call, task.task), task.storage, task.pool)
            if storage is not None:
                found.append(render.task(task, storage, call.as_msgpack))
        call.shard = shards[0].number if len(shards) == 1 else NOWHERE
        return wire.TakeTasksReply(tasks=found, cluster=self._replica.cluster)

    def _asked(self, number: int | None) -> list[ShardPort]:
        shards = self._routing.shards
        if number is None:
            # Who leads nothing sends the worker to the catalogue's leader, which knows whether it is one.
            led = [shard for shard in shards if shard.ready]
            self._turn += 1
            first = self._turn % len(led) if led else 0
            return led[first:] + led[:first] or [shards[CATALOGUE]]
        if number >= len(shards):
            raise ApiError("invalid_field", f"the shards here are 0 to {len(shards) - 1}", "shard")
        return [shards[number]]

    async def _take(
        self, call: Call, shards: list[ShardPort], command: commands.TakeTasks, wait_ms: int
    ) -> Answer:
        """Tasks of the shards, at most as many locations as the command allows, waited for when there are
        none. What one shard has handed out already is not lost by the refusal of the next.
        """
        if len(shards) == 1:
            call.shard = shards[0].number
            return await shards[0].take_tasks(command, wait_ms) if wait_ms else shards[0].read(command)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_ms / 1000
        while True:
            answer = self._round(call, shards, command)
            left_s = deadline_s - loop.time()
            if isinstance(answer, Rejection) or answer.tasks or left_s <= 0:
                return answer
            await asyncio.sleep(min(TURN_S, left_s))

    @staticmethod
    def _round(call: Call, shards: list[ShardPort], command: commands.TakeTasks) -> Answer:
        found: list[replies.Task] = []
        left, lost = command.limit, 0
        for shard in shards:
            call.shard = shard.number
            try:
                answer: Answer = shard.read(replace(command, limit=left))
            except NotLeader:
                lost += 1
                if lost == len(shards):
                    raise
                continue
            if isinstance(answer, Rejection):
                return replies.Tasks(found) if found else answer
            found += answer.tasks
            left -= sum(len(task.locations) for task in answer.tasks)
            if left <= 0:
                break
        return replies.Tasks(found)

    async def confirm_task(self, call: Call, body: wire.ConfirmTaskRequest) -> Struct:
        worker = name(call.segments[3], "worker")
        task = name(call.segments[5], "task")
        shard = self._routing.task(call, task)
        confirmed: replies.Confirmed = taken(
            await shard.submit(convert.confirm_task(worker, task, body, self._limits))
        )
        return wire.ConfirmTaskReply(gone=confirmed.gone, again=confirmed.again)

    def unknown_places(self, call: Call, body: wire.UnknownRequest) -> Struct:
        command = convert.unknown_places(name(call.segments[3], "worker"), body, self._limits)
        call.shard = self._routing.location(command.locations[0]) if command.locations else CATALOGUE
        shard = self._routing.shards[call.shard]
        found: replies.UnknownPlaces = taken(shard.read(command))
        return wire.UnknownReply(unknown=render.flags(found.unknown, call.as_msgpack))
