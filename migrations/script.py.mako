"""${message}."""

import sqlalchemy as sa
from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    """Must leave the database such that the release before works on it, while it runs."""
    schema = op.get_context().version_table_schema
