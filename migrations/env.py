"""Run by Alembic. The service hands in its connection and schema (`metaservice.journal.postgres_migrate`);
by hand, `alembic -c migrations/alembic.ini -x schema=NAME upgrade head --sql` prints what would be run, for
databases whose tables somebody else has to make."""

from alembic import context

connection = context.config.attributes.get("connection")
if connection is not None:
    context.configure(connection=connection, version_table_schema=context.config.attributes["schema"])
    context.run_migrations()
elif context.is_offline_mode():
    schema = context.get_x_argument(as_dictionary=True).get("schema", "ucm")
    context.configure(dialect_name="postgresql", version_table_schema=schema)
    with context.begin_transaction():
        context.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        context.run_migrations()
else:
    raise SystemExit("the service migrates by itself when it starts; here, ask for --sql")
