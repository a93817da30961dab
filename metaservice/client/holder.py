"""The owner's side of background renewal: what is registered, what is held, and who renews it."""

import logging
from collections.abc import Callable
from threading import Condition, Lock

from metaservice.wire.schemas import StorageRef

from . import forks
from .calls import Who
from .config import ClientConfig, Keepalive
from .hosts import Host, start_host
from .messages import (
    Doubt,
    Drop,
    Event,
    Forget,
    Joined,
    KeepLease,
    KeepSession,
    Left,
    Lost,
    Member,
    Renewed,
    Said,
)
from .notices import Notices
from .results import Registered, now_ms

log = logging.getLogger("metaservice.client")


class Registration:
    """A registration as its owner sees it. It changes by itself: after the service told the keeper to
    register again, `incarnation` is another and `lost` one higher; write sessions from before are lost.

    `active` is False while there is no current registration; `failure` then says why the last try
    failed, if one did.
    """

    def __init__(
        self, kind: str, id: str, incarnation: str, on_lost: "Callable[[Registration], None] | None"
    ) -> None:
        self.kind = kind
        self.id = id
        self.incarnation = incarnation
        self.active = False
        self.lost = 0
        self.failure: str | None = None
        self.detail = ""
        self.cluster = ""
        self.epoch = 0
        self.heartbeat_ms = 0
        self.suspect_ms = 0
        self.expire_ms = 0
        self.storage_table: list[StorageRef] = []
        self._on_lost = on_lost
        self._changed = Condition()

    def wait_active(self, timeout_ms: int) -> bool:
        """Wait until it is active, at most so long. Not for an event loop: poll `active` there."""
        with self._changed:
            return self._changed.wait_for(lambda: self.active, timeout_ms / 1_000)

    def after_fork(self) -> None:
        self._changed = Condition()

    def joined(self, answer: Registered | Joined) -> None:
        """The service took the registration."""
        with self._changed:
            self.incarnation = answer.incarnation
            self.cluster = answer.cluster
            self.epoch = answer.epoch
            self.heartbeat_ms = answer.heartbeat_ms
            self.suspect_ms = answer.suspect_ms
            self.expire_ms = answer.expire_ms
            self.storage_table = answer.storage_table
            self.failure, self.detail = None, ""
            self.active = True
            self._changed.notify_all()

    def left(self) -> None:
        """The service knows it no longer. Calls the owner back."""
        self.active = False
        self.lost += 1
        if self._on_lost is not None:
            self._on_lost(self)


class Holder:
    """What a client holds. Everything but `start` returns at once. Thread safe: single dict and
    attribute operations."""

    def __init__(self, config: ClientConfig, who: Who, notices: Notices) -> None:
        self._config = config
        self._who = who
        self._notices = notices
        self._host: Host | None = None
        self._mode: Keepalive | None = None
        self._start = Lock()
        self._closed = False
        self._kept: dict[str, KeepLease | KeepSession] = {}
        self.registration: Registration | None = None
        forks.register(self)

    def after_fork(self) -> None:
        """The keeper, its leases and sessions stay with the parent. The identity is kept for calls."""
        self._host = None
        self._kept = {}
        self._start = Lock()
        if self.registration is not None:
            self.registration.after_fork()

    # -- registration

    def register(self, registration: Registration, member: Member, keepalive: Keepalive | None) -> None:
        """Act as this member from now on, and keep its registration alive unless `keepalive` is None. A
        registration before it is given up (it expires by itself); leases that were kept go on."""
        self.registration = registration
        self._who.act_as(member.kind, member.id, member.incarnation if registration.active else "")
        if keepalive is None:
            if self._host is not None:
                self._host.post(Forget())
            return
        host = self._running(keepalive)
        if host is not None:
            host.post(member)

    def act_as(self, kind: str, id: str, incarnation: str) -> None:
        """Act as a member that is kept alive elsewhere. A registration before it is given up."""
        who = self._who
        if self.registration is None and (who.kind, who.id, who.incarnation) == (kind, id, incarnation):
            return
        self.leave()
        self._who.act_as(kind, id, incarnation)

    def _running(self, mode: Keepalive) -> Host | None:
        """The keeper, running in this mode; None once closed."""
        with self._start:
            if self._closed:
                return None
            if self._host is None or self._mode != mode:
                before, self._mode = self._host, mode
                self._host = start_host(mode, self._config, self.handle, self._kept)
                if before is not None:
                    before.close()
            return self._host

    def leave(self) -> None:
        """No longer act as the member, and send no heartbeats."""
        registration, self.registration = self.registration, None
        self._who.incarnation = ""
        if registration is not None:
            registration.active = False
        if self._host is not None:
            self._host.post(Forget())

    def doubt(self) -> None:
        """A call was told to register again."""
        registration = self.registration
        if registration is None or not registration.active:
            return
        if self._host is not None:
            self._host.post(Doubt())
        else:
            self._left(registration)

    def close(self, patience_ms: int = 0) -> None:
        """Stop renewing. Waits for the keeper's end at most `patience_ms`."""
        with self._start:
            self._closed = True
            host, self._host = self._host, None
        self._who.incarnation = ""
        if host is not None:
            host.close(patience_ms)

    # -- what is kept

    def keep_lease(self, lease: str, ttl_ms: int, deadline_ms: int) -> None:
        self._keep(lease, KeepLease(lease, ttl_ms, deadline_ms, now_ms() + self._config.keep_ms_max))

    def keep_session(
        self, session: str, engine: str, incarnation: str, ttl_ms: int, deadline_ms: int
    ) -> None:
        until_ms = now_ms() + self._config.keep_ms_max
        self._keep(session, KeepSession(session, engine, incarnation, ttl_ms, deadline_ms, until_ms))

    def _keep(self, id: str, item: KeepLease | KeepSession) -> None:
        self._kept[id] = item
        host = self._host or self._running(self._config.keepalive)
        if host is not None:
            host.post(item)

    def leases_renewed(self, leases: list[str], deadline_ms: int) -> None:
        self._renewed(dict.fromkeys(leases, deadline_ms))

    def drop_leases(self, leases: list[str]) -> None:
        dropped = [lease for lease in leases if self._kept.pop(lease, None) is not None]
        if dropped and self._host is not None:
            self._host.post(Drop(leases=dropped))

    def drop_session(self, session: str) -> None:
        if self._kept.pop(session, None) is not None and self._host is not None:
            self._host.post(Drop(sessions=[session]))

    def held(self, id: str) -> bool:
        """Whether a lease or session that is renewed in the background is known to hold now."""
        item = self._kept.get(id)
        return item is not None and now_ms() < item.deadline_ms

    def _renewed(self, deadlines_ms: dict[str, int]) -> None:
        for id, deadline_ms in deadlines_ms.items():
            item = self._kept.get(id)
            if item is not None:
                item.deadline_ms = max(item.deadline_ms, deadline_ms)

    # -- what the keeper tells

    def handle(self, event: Event) -> None:
        """Take one event. Called from the keeper's thread, or the one that listens to its process."""
        registration = self.registration
        match event:
            case Joined():
                if registration is not None and registration.id == event.id:
                    registration.joined(event)
                    self._who.incarnation = event.incarnation
                    log.info(
                        "%s %s is registered as %s", registration.kind, registration.id, event.incarnation
                    )
            case Left(id, incarnation):
                if registration is not None and (registration.id, registration.incarnation) == (
                    id,
                    incarnation,
                ):
                    self._left(registration)
            case Renewed(deadlines_ms):
                self._renewed(deadlines_ms)
            case Lost(leases, sessions, why):
                for id in (*leases, *sessions):
                    self._kept.pop(id, None)
                text = f"{len(leases)} leases and {len(sessions)} write sessions are lost: {why}"
                self._notices.say(logging.WARNING, f"lost {why}", text)
            case Said(level, kind, text):
                self._notices.say(level, kind, text)

    def _left(self, registration: Registration) -> None:
        self._who.incarnation = ""
        log.warning(
            "%s %s lost its registration %s", registration.kind, registration.id, registration.incarnation
        )
        try:
            registration.left()
        except Exception:
            log.exception("the owner's callback about a lost registration failed")
