"""Who this engine is at the service: its instance, and its registration under an incarnation.

A service that is away is asked again for ever. What it refuses for good is refused for good: an engine whose
bytes are not what its instance's name says neither reads nor writes.
"""

import logging
from collections.abc import Callable, Sequence
from random import Random
from threading import Lock

from engine_adapters.namespace import Away, Namespace, Part, Refused, Registered, register
from engine_adapters.vllm.adapters import Adapters
from engine_adapters.vllm.counts import Counts
from engine_adapters.vllm.orders import Identity
from engine_adapters.vllm.publishing import Presence, publication_of
from engine_adapters.vllm.settings import Settings
from metaservice.client import Client, Registration
from metaservice.client.breaker import Backoff

log = logging.getLogger(__name__)

PAUSE_MS_MIN = 100
PAUSE_MS_MAX = 5_000
DOUBT_MS = 1_000
"""A service that said that it knows nothing of the instance is asked about it this often at most."""
NEVER_MS = 1 << 62


class Joining:
    """`turn` is called from one thread and waits for the service; all else returns at once, from any
    thread."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        namespace: Namespace,
        parts: Sequence[Part],
        counts: Counts,
        presence: Presence,
        *,
        clock: Callable[[], int],
        random: Random,
        changed: Callable[[], None],
    ) -> None:
        """`presence`: where the engine is, as it registers. `changed`: called when there is another instance
        or something to do, from any thread."""
        self.refused: str | None = None
        """Why the service will not have this engine."""
        self.trouble = ""
        """Why the last try came to nothing, if it did."""
        self.adapters = Adapters(self._register_adapter, clock)
        self._client = client
        self._settings = settings
        self._namespace = namespace
        self._parts = parts
        self._counts = counts
        self._presence = presence
        self._clock = clock
        self._changed = changed
        self._lock = Lock()
        self._backoff = Backoff(PAUSE_MS_MIN, PAUSE_MS_MAX, random)
        self._generation = 0
        self._sure = False
        self._not_before_ms = 0
        self._instance: str | None = None
        self._registration: Registration | None = None
        self._identity: Identity | None = None

    # ------------------------------------------------------------ who we are

    @property
    def generation(self) -> int:
        """Another number with each namespace: what was asked under an older one is worthless."""
        return self._generation

    @property
    def instance(self) -> str | None:
        """The instance of the base model, once it is registered."""
        return self._instance

    @property
    def identity(self) -> Identity | None:
        """As whom the engine looks up and writes; None while the service does not have it registered."""
        instance, registration = self._instance, self._registration
        if instance is None or registration is None or not registration.active:
            return None
        known = self._identity
        if known is None or known.incarnation != registration.incarnation or known.instance != instance:
            known = Identity(instance, self._settings.engine, registration.incarnation)
            self._identity = known
        return known

    def doubt(self) -> None:
        """The service said that it does not know an instance of ours: it may have lost everything."""
        self._sure = False
        self._changed()

    def renew(self, namespace: Namespace) -> None:
        """The weights are others: nobody is who they were."""
        with self._lock:
            self._namespace = namespace
            self._generation += 1
            self._instance = self._registration = None
            self._sure = False
            self.refused = None
            self._not_before_ms = 0
            self._backoff.reset()
        self.adapters.renew()
        self._changed()

    # ------------------------------------------------------------ becoming it

    def turn(self) -> int:
        """Do what is to be done. Returns when the next thing is, by the clock."""
        if self.refused is not None or (self._sure and self._registration is not None):
            return NEVER_MS
        if (now := self._clock()) < self._not_before_ms:
            return self._not_before_ms
        if not self._sure:
            with self._lock:
                generation, namespace = self._generation, self._namespace
            outcome = self._register(namespace)
            with self._lock:
                if generation != self._generation:
                    return now
                if not self._settled(outcome):
                    return self._not_before_ms
        self._join()
        return NEVER_MS

    def _settled(self, outcome: Registered | Refused | Away) -> bool:
        """Whether the instance is registered now. Holds the lock."""
        match outcome:
            case Registered(instance):
                if self.trouble:
                    log.info("instance %s is registered", instance)
                self.trouble, self._sure = "", True
                self._not_before_ms = self._clock() + DOUBT_MS
                self._backoff.reset()
                self._instance = instance
                return True
            case Refused(reason=reason):
                log.error("the metadata service refuses this engine, which goes on without it: %s", reason)
                self.refused = reason
                self._instance = self._registration = None
            case Away(failure=failure, detail=detail):
                trouble = f"{failure}: {detail}"
                if trouble != self.trouble:
                    log.warning("the instance cannot be registered yet: %s", trouble)
                self.trouble = trouble
                self._not_before_ms = self._clock() + self._backoff.next_ms()
        return False

    def _join(self) -> None:
        """Register the engine; the client's keeper goes on trying, and keeps it registered."""
        with self._lock:
            if self._registration is not None or self._instance is None:
                return
            generation, instance, canary = self._generation, self._instance, self._namespace.canary
        registration = self._client.register_engine(
            self._settings.engine,
            instance=instance,
            rank=self._presence.rank,
            endpoints=self._presence.endpoints,
            canary=canary,
            keepalive="thread",
            on_lost=self._lost,
        )
        with self._lock:
            if generation == self._generation:
                self._registration = registration
        self._counts.add("registrations")
        self._changed()

    def _lost(self, registration: Registration) -> None:
        """The service knows the engine no longer, or another has its name. The keeper registers it anew,
        unless the service has lost the instance too."""
        self._counts.add("registrations_lost")
        if registration is self._registration:
            self.doubt()

    def _register(
        self, namespace: Namespace, digest: str = "", name: str = ""
    ) -> Registered | Refused | Away:
        settings = self._settings
        base = namespace.instance_id(settings.instance_prefix) if digest else ""
        return register(
            self._client,
            namespace,
            group=settings.group,
            prefix=settings.instance_prefix,
            parts=self._parts,
            adapter=digest,
            publication=publication_of(settings, self._presence.model, lora=name, base=base),
        )

    def _register_adapter(self, digest: str, name: str) -> Registered | Refused | Away:
        return self._register(self._namespace, digest, name)
