"""Every statement of the journal in PostgreSQL, in one place.

They are built with SQLAlchemy Core, checked against the tables, and compiled once a schema to asyncpg's SQL.
They are run by asyncpg itself: executing the append through SQLAlchemy's engine takes about twice as long.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ClauseElement,
    Executable,
    Integer,
    LargeBinary,
    Text,
    Uuid,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.dialects.postgresql.asyncpg import dialect

from metaservice.journal.postgres_schema import schema_of

PAGE_ROWS = 512
PAGE_BYTES = 4 * 1024 * 1024
TRIM_BATCHES = 1_000
"""Batches removed by one statement: it bounds how long the rows stay locked."""
SAVE_IDLE_S = 600
"""A save that has written nothing for longer was abandoned."""

_UNCLAIMED = "'00000000-0000-0000-0000-000000000000'::uuid"


class Statement:
    """SQL with `$1..$n`, and the names of its values in that order."""

    __slots__ = ("_constants", "_names", "sql")

    def __init__(self, built: Executable) -> None:
        assert isinstance(built, ClauseElement)
        compiled = built.compile(dialect=dialect())  # type: ignore[no-untyped-call]
        self.sql = str(compiled)
        self._names = tuple(compiled.positiontup or ())  # type: ignore[attr-defined]
        self._constants = {name: value for name, value in compiled.params.items() if value is not None}

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """The values in the order of the SQL."""
        constants = self._constants
        return [values[name] if name in values else constants[name] for name in self._names]


def _given(name: str, kind: Any = BigInteger) -> Any:
    return bindparam(name, type_=kind)


class Statements:
    """All statements on one schema; each names its values. See `statements_of`."""

    def __init__(self, schema: str) -> None:
        tables = schema_of(schema)
        shard, journal, snapshot = tables.shard, tables.journal, tables.snapshot
        chunk, follower = tables.snapshot_chunk, tables.follower
        number = _given("shard", Integer)
        mine = shard.c.id == number
        read_only = (func.current_setting("transaction_read_only") == "on").label("read_only")
        marks = (shard.c.epoch, shard.c.head_seq, shard.c.trimmed_seq, read_only)

        self.make_shard = Statement(
            upsert(shard)
            .values(
                id=number, epoch=0, holder="", token=literal_column(_UNCLAIMED), settlings=0,
                head_seq=0, trimmed_seq=0, batches=0, payload_bytes=0,
            )
            .on_conflict_do_nothing()
        )  # fmt: skip
        self.marks = Statement(select(*marks).where(mine))
        self.size = Statement(select(shard.c.batches, shard.c.payload_bytes).where(mine))

        last = (
            select(journal.c.last_seq, journal.c.epoch)
            .where(journal.c.shard == number)
            .order_by(journal.c.first_seq.desc())
            .limit(1)
            .subquery("last")
        )
        whole = and_(snapshot.c.shard == number, snapshot.c.whole)
        newest = select(func.max(snapshot.c.seq)).where(whole).scalar_subquery()
        epoch_seen = func.greatest(
            shard.c.epoch,
            select(last.c.epoch).scalar_subquery(),
            select(func.max(snapshot.c.epoch)).where(whole).scalar_subquery(),
        )
        self.opening = Statement(
            select(
                *marks,
                epoch_seen.label("epoch_seen"),
                last.c.last_seq.label("journal_seq"),
                newest.label("snapshot_seq"),
            )
            .select_from(shard.outerjoin(last, true()))
            .where(mine)
        )
        self.claim = Statement(
            update(shard)
            .where(mine)
            .values(
                epoch=epoch_seen + literal_column("1"),
                holder=_given("holder", Text),
                token=func.gen_random_uuid(),
                settlings=literal_column("0"),
            )
            .returning(shard.c.epoch, shard.c.token)
        )
        fence = and_(
            mine,
            shard.c.epoch == _given("epoch"),
            shard.c.token == _given("token", Uuid),
            shard.c.settlings == _given("settlings"),
            shard.c.head_seq == _given("before_seq"),
        )
        moved = (
            update(shard)
            .where(fence)
            .values(
                head_seq=_given("last_seq"),
                batches=shard.c.batches + literal_column("1"),
                payload_bytes=shard.c.payload_bytes + _given("payload_bytes"),
            )
            .returning(shard.c.id)
            .cte("moved")
        )
        columns = [column.name for column in journal.c]
        batch = (
            moved.c.id,
            _given("first_seq"),
            _given("last_seq"),
            _given("epoch"),
            _given("payload", LargeBinary),
            _given("crc"),
        )
        written = insert(journal).from_select(columns, select(*batch))
        self.append = Statement(written.returning(journal.c.last_seq))
        put = written.returning(journal.c.shard, journal.c.last_seq).cte("put")
        hint = put.c.shard.cast(Text).op("||")(" ").op("||")(put.c.last_seq.cast(Text))
        self.append_and_notify = Statement(
            select(func.pg_notify(literal_column(f"'{channel_of(schema)}'"), hint)).select_from(put)
        )
        # One row is always written, so that its commit waits for the standby where there is one: what was
        # committed before it, the append too, has reached that standby when it returns.
        # Never lowered: a settling that comes late itself must not open the fence again.
        raised = func.greatest(shard.c.settlings, _given("settlings"))
        ours = and_(shard.c.epoch == _given("epoch"), shard.c.token == _given("token", Uuid))
        self.settle = Statement(
            update(shard)
            .where(mine)
            .values(settlings=case((ours, raised), else_=shard.c.settlings))
            .returning(shard.c.epoch)
        )

        before = (
            func.sum(func.octet_length(journal.c.payload)).over(order_by=journal.c.first_seq)
            - func.octet_length(journal.c.payload)
        ).label("before_bytes")
        some = (
            select(journal, before)
            .where(journal.c.shard == number, journal.c.first_seq >= _given("from_seq"))
            .order_by(journal.c.first_seq)
            .limit(_given("rows", Integer))
            .subquery("some")
        )
        previous = (
            select(journal.c.epoch, journal.c.crc)
            .where(journal.c.shard == number, journal.c.first_seq == _given("previous_seq"))
            .subquery("previous")
        )
        self.page = Statement(
            select(
                *marks,
                previous.c.epoch.label("previous_epoch"),
                previous.c.crc.label("previous_crc"),
                some.c.first_seq, some.c.last_seq, some.c.epoch.label("batch_epoch"),
                some.c.payload, some.c.crc,
            )
            .select_from(
                shard.outerjoin(previous, true()).outerjoin(some, some.c.before_bytes < _given("bytes"))
            )
            .where(mine)
            .order_by(some.c.first_seq)
        )  # fmt: skip
        self.inside = Statement(
            select((journal.c.last_seq >= _given("seq")).label("inside"))
            .where(journal.c.shard == number, journal.c.first_seq < _given("seq"))
            .order_by(journal.c.first_seq.desc())
            .limit(1)
        )

        self.report = Statement(
            upsert(follower)
            .values(shard=number, replica=_given("replica", Text), applied_seq=_given("applied_seq"))
            .on_conflict_do_update(
                index_elements=[follower.c.shard, follower.c.replica],
                set_={"applied_seq": _given("applied_seq"), "reported_at": func.now()},
            )
        )
        second: Any = literal_column("interval '1 second'")
        self.slowest = Statement(
            select(func.min(follower.c.applied_seq).label("applied_seq")).where(
                follower.c.shard == number,
                follower.c.reported_at
                > func.now() - second * _given("follower_ms_max") / literal_column("1000"),
            )
        )
        oldest = (
            select(journal.c.first_seq)
            .where(
                journal.c.shard == number,
                journal.c.first_seq <= _given("upto_seq"),
                journal.c.last_seq <= _given("upto_seq"),
            )
            .order_by(journal.c.first_seq)
            .limit(_given("rows", Integer))
        )
        gone = (
            delete(journal)
            .where(journal.c.shard == number, journal.c.first_seq.in_(oldest))
            .returning(journal.c.last_seq, func.octet_length(journal.c.payload).label("size_bytes"))
            .cte("gone")
        )
        sums = select(
            func.count().label("batches"),
            func.coalesce(func.sum(gone.c.size_bytes), literal_column("0")).label("bytes"),
            func.max(gone.c.last_seq).label("last_seq"),
        ).cte("sums")
        self.trim = Statement(
            update(shard)
            .where(mine, sums.c.batches > literal_column("0"))
            .values(
                trimmed_seq=func.greatest(shard.c.trimmed_seq, sums.c.last_seq),
                batches=shard.c.batches - sums.c.batches,
                payload_bytes=shard.c.payload_bytes - sums.c.bytes,
            )
            .returning(sums.c.batches)
        )

        save = snapshot.c.id == _given("id", Uuid)
        self.begin_save = Statement(
            insert(snapshot)
            .values(
                shard=number, seq=_given("seq"), epoch=_given("epoch"), digest=_given("digest", LargeBinary),
                chunks=literal_column("0"), size_bytes=literal_column("0"), whole=literal_column("false"),
            )
            .returning(snapshot.c.id)
        )  # fmt: skip
        touched = (
            update(snapshot)
            .where(save, ~snapshot.c.whole)
            .values(touched_at=func.now())
            .returning(snapshot.c.id)
            .cte("touched")
        )
        self.save_chunk = Statement(
            insert(chunk)
            .from_select(
                [column.name for column in chunk.c],
                select(
                    touched.c.id, _given("number", Integer), _given("crc"), _given("payload", LargeBinary)
                ),
            )
            .returning(chunk.c.number)
        )
        self.end_save = Statement(
            update(snapshot)
            .where(save, ~snapshot.c.whole)
            .values(
                chunks=_given("chunks", Integer), size_bytes=_given("size_bytes"),
                whole=literal_column("true"), touched_at=func.now(),
            )
            .returning(snapshot.c.id)
        )  # fmt: skip
        self.drop_save = Statement(delete(snapshot).where(save))
        # In order of id: two savers that clean up at the same time lock the same rows in the same order.
        doomed = (
            select(snapshot.c.id)
            .where(
                snapshot.c.shard == number,
                case(
                    (snapshot.c.whole, snapshot.c.seq < _given("below_seq")),
                    else_=snapshot.c.touched_at < func.now() - second * _given("idle_s"),
                ),
            )
            .order_by(snapshot.c.id)
            .with_for_update()
        )
        self.drop_old = Statement(delete(snapshot).where(snapshot.c.id.in_(doomed)))
        newer = snapshot.alias("newer")
        replaced = (
            select(snapshot.c.id)
            .where(
                whole,
                exists().where(
                    newer.c.shard == number,
                    newer.c.whole,
                    newer.c.seq == snapshot.c.seq,
                    newer.c.touched_at > snapshot.c.touched_at,
                ),
            )
            .order_by(snapshot.c.id)
            .with_for_update(of=snapshot)
        )
        self.drop_replaced = Statement(delete(snapshot).where(snapshot.c.id.in_(replaced)))
        described = (
            snapshot.c.id, snapshot.c.seq, snapshot.c.epoch, snapshot.c.digest, snapshot.c.chunks,
            snapshot.c.size_bytes,
        )  # fmt: skip
        self.snapshots = Statement(
            select(*described, read_only)
            .where(whole)
            .order_by(snapshot.c.seq.desc(), snapshot.c.touched_at.desc(), snapshot.c.id)
        )
        self.snapshot = Statement(select(*described).where(save, snapshot.c.whole))
        self.chunk = Statement(
            select(chunk.c.crc, chunk.c.payload).where(
                chunk.c.snapshot == _given("id", Uuid), chunk.c.number == _given("number", Integer)
            )
        )
        self.queue_usage = Statement(select(func.pg_notification_queue_usage().label("used")))


@cache
def statements_of(schema: str) -> Statements:
    """The statements on `schema`, compiled once."""
    return Statements(schema)


def channel_of(schema: str) -> str:
    """The channel on which the appends of a schema are told; channels belong to the whole database."""
    return f"{schema}_journal"
