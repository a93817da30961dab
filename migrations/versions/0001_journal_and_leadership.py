"""The journal, its snapshots and followers, and leadership in the database."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes every table anew."""
    schema = op.get_context().version_table_schema
    now = sa.text("now()")
    op.create_table(
        "cluster",
        sa.Column(
            "one", sa.SmallInteger, sa.CheckConstraint("one = 1"), primary_key=True, server_default="1"
        ),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("shards", sa.Integer, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=now),
        schema=schema,
    )
    # The shard row changes with every append and the journal lives on it: room for its next versions on its
    # own page, and no index on anything that changes, keep each change from touching an index.
    op.create_table(
        "shard",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("token", sa.Uuid, nullable=False),
        sa.Column("settlings", sa.BigInteger, nullable=False),
        sa.Column("head_seq", sa.BigInteger, nullable=False),
        sa.Column("trimmed_seq", sa.BigInteger, nullable=False),
        sa.Column("batches", sa.BigInteger, nullable=False),
        sa.Column("payload_bytes", sa.BigInteger, nullable=False),
        schema=schema,
        postgresql_with={"fillfactor": "20"},
    )
    op.create_table(
        "journal",
        sa.Column("shard", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("first_seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("last_seq", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("crc", sa.BigInteger, nullable=False),
        schema=schema,
    )
    op.create_table(
        "snapshot",
        sa.Column("id", sa.Uuid, primary_key=True, server_default=sa.text("gen_random_uuid()")),
        sa.Column("shard", sa.Integer, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("chunks", sa.Integer, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("whole", sa.Boolean, nullable=False),
        sa.Column("touched_at", sa.DateTime(timezone=True), nullable=False, server_default=now),
        schema=schema,
    )
    op.create_index("snapshot_place", "snapshot", ["shard", "seq"], schema=schema)
    op.create_table(
        "snapshot_chunk",
        sa.Column(
            "snapshot", sa.Uuid, sa.ForeignKey(f"{schema}.snapshot.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("crc", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        schema=schema,
    )
    # Keys and digests do not compress: trying to costs time in every append.
    op.execute(f'ALTER TABLE "{schema}".journal ALTER COLUMN payload SET STORAGE EXTERNAL')
    op.execute(f'ALTER TABLE "{schema}".snapshot_chunk ALTER COLUMN payload SET STORAGE EXTERNAL')
    op.create_table(
        "follower",
        sa.Column("shard", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("replica", sa.Text, primary_key=True),
        sa.Column("applied_seq", sa.BigInteger, nullable=False),
        sa.Column("reported_at", sa.DateTime(timezone=True), nullable=False, server_default=now),
        schema=schema,
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "replica",
        sa.Column("life", sa.Text, primary_key=True),
        sa.Column("replica", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("report", sa.Text, nullable=False),
        sa.Column("superseded", sa.Boolean, nullable=False, server_default=sa.text("false")),
        schema=schema,
        postgresql_with={"fillfactor": "50"},
    )
    # Of two processes that start under one name, one has to supersede the other.
    op.create_index(
        "replica_name",
        "replica",
        ["replica"],
        unique=True,
        schema=schema,
        postgresql_where=sa.text("NOT superseded"),
    )
    op.create_table(
        "seat",
        sa.Column("shard", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("life", sa.Text, sa.ForeignKey(f"{schema}.replica.life", ondelete="SET NULL")),
        sa.Column("successor", sa.Text, nullable=False, server_default=""),
        schema=schema,
        postgresql_with={"fillfactor": "50"},
    )
