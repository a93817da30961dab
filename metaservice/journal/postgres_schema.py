"""The journal's tables as SQLAlchemy sees them. The migrations make them; a test compares the two.

Tables of other rooms in the same schema (leadership's) are described there.
"""

from functools import cache

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)


class Schema:
    """The tables in one schema of a database. See `schema_of`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metadata = MetaData(schema=name)
        self.cluster = Table(
            "cluster",
            self.metadata,
            Column("one", SmallInteger, primary_key=True, server_default=text("1")),
            Column("id", Text, nullable=False),
            Column("shards", Integer, nullable=False),
            Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
        )
        # `token` tells the claims of one epoch number apart: after a failover of the database to a standby
        # that never saw the first claim, the number alone could be given twice. `settlings` moves when the
        # fate of an append is settled, so that the append cannot come in late.
        self.shard = Table(
            "shard",
            self.metadata,
            Column("id", Integer, primary_key=True, autoincrement=False),
            Column("epoch", BigInteger, nullable=False),
            Column("holder", Text, nullable=False),
            Column("token", Uuid, nullable=False),
            Column("settlings", BigInteger, nullable=False),
            Column("head_seq", BigInteger, nullable=False),
            Column("trimmed_seq", BigInteger, nullable=False),
            Column("batches", BigInteger, nullable=False),
            Column("payload_bytes", BigInteger, nullable=False),
        )
        self.journal = Table(
            "journal",
            self.metadata,
            Column("shard", Integer, primary_key=True, autoincrement=False),
            Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
            Column("last_seq", BigInteger, nullable=False),
            Column("epoch", BigInteger, nullable=False),
            Column("payload", LargeBinary, nullable=False),
            Column("crc", BigInteger, nullable=False),
        )
        self.snapshot = Table(
            "snapshot",
            self.metadata,
            Column("id", Uuid, primary_key=True, server_default=text("gen_random_uuid()")),
            Column("shard", Integer, nullable=False),
            Column("seq", BigInteger, nullable=False),
            Column("epoch", BigInteger, nullable=False),
            Column("digest", LargeBinary, nullable=False),
            Column("chunks", Integer, nullable=False),
            Column("size_bytes", BigInteger, nullable=False),
            Column("whole", Boolean, nullable=False),
            Column("touched_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
            Index("snapshot_place", "shard", "seq"),
        )
        self.snapshot_chunk = Table(
            "snapshot_chunk",
            self.metadata,
            Column("snapshot", ForeignKey(self.snapshot.c.id, ondelete="CASCADE"), primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("crc", BigInteger, nullable=False),
            Column("payload", LargeBinary, nullable=False),
        )
        self.follower = Table(
            "follower",
            self.metadata,
            Column("shard", Integer, primary_key=True, autoincrement=False),
            Column("replica", Text, primary_key=True),
            Column("applied_seq", BigInteger, nullable=False),
            Column("reported_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
        )


@cache
def schema_of(name: str) -> Schema:
    """The tables in the schema `name`."""
    return Schema(name)
