"""What calls about routers and cache events return; as in `results`, the safe thing after a failure."""

from msgspec import Struct, field

from metaservice.wire.schemas_events import AttachmentView, EngineRoute, EngineView, PoolRoute, StreamView


class RouteResult(Struct, kw_only=True):
    """Who holds how much of a prompt of `asked` whole blocks: `engines`, the best first, and the `pool` (None
    after a failure; then nobody is known to hold anything)."""

    asked: int = 0
    block_size_tokens: int = 0
    engines: list[EngineRoute] = field(default_factory=list)
    pool: PoolRoute | None = None
    failure: str | None = None
    detail: str = ""


class ReportResult(Struct, kw_only=True):
    """What became of a report: a ReportOutcome an item, and whether the replica wants a `snapshot` instead.
    `number` is of the last report that it took, `visible_ms` how soon it wants to hear again (0 after a
    failure)."""

    stored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    want: str = ""
    visible_ms: int = 0
    number: int = 0
    failure: str | None = None
    detail: str = ""


class RestateResult(Struct, kw_only=True):
    """How many blocks routers will be told of again."""

    blocks: int = 0
    failure: str | None = None
    detail: str = ""


class EventsResult(Struct, kw_only=True):
    """The streams, engines and attachments of one replica. Empty after a failure."""

    replica: str = ""
    streams: list[StreamView] = field(default_factory=list)
    engines: list[EngineView] = field(default_factory=list)
    attachments: list[AttachmentView] = field(default_factory=list)
    failure: str | None = None
    detail: str = ""
