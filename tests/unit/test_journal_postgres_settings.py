"""DSNs: several hosts, what is refused, and that nothing secret is shown."""

import pytest

from metaservice.journal.postgres_settings import PostgresSettings

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("dsn", "hosts"),
    [
        (
            f"postgresql://u:{SECRET}@db/ucm",
            [f"postgresql://u:{SECRET}@db/ucm?target_session_attrs=read-write"],
        ),
        (
            f"postgresql+asyncpg://u:{SECRET}@a:1,b:2,[::1]:3/ucm?sslmode=disable",
            [
                f"postgresql://u:{SECRET}@{host}/ucm?sslmode=disable&target_session_attrs=read-write"
                for host in ("a:1", "b:2", "[::1]:3")
            ],
        ),
        (
            "postgres://u@/ucm?host=a,b&port=1,2",
            [
                "postgresql://u@/ucm?host=a&port=1&target_session_attrs=read-write",
                "postgresql://u@/ucm?host=b&port=2&target_session_attrs=read-write",
            ],
        ),
        (
            "postgresql:///ucm?host=/run/pg&target_session_attrs=any",
            ["postgresql:///ucm?host=%2Frun%2Fpg&target_session_attrs=any"],
        ),
        (
            "postgresql://a,b/ucm?target_session_attrs=primary",
            [f"postgresql://{host}/ucm?target_session_attrs=primary" for host in "ab"],
        ),
    ],
)
def test_a_dsn_is_one_dsn_for_each_host(dsn: str, hosts: list[str]) -> None:
    assert PostgresSettings(dsn).host_dsns() == tuple(hosts)


@pytest.mark.parametrize(
    "dsn", ["", "db", "mysql://u@h/d", "http://h", f"postgresql://u:{SECRET}@/d?host=a,b&port=1,2,3"]
)
def test_what_is_no_dsn_is_refused_without_showing_it(dsn: str) -> None:
    with pytest.raises(ValueError, match="a DSN reads postgresql://") as caught:
        PostgresSettings(dsn)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("schema", ["", "Ucm", "1x", 'u"; DROP', "a.b", "x" * 49, "ucm\n"])
def test_a_schema_is_a_plain_name(schema: str) -> None:
    with pytest.raises(ValueError, match="cannot be a schema"):
        PostgresSettings("postgresql://h/d", schema)


def test_a_deadline_is_some_time() -> None:
    with pytest.raises(ValueError, match="0 ms"):
        PostgresSettings("postgresql://h/d", timeout_ms=0)


@pytest.mark.parametrize(
    ("dsn", "place"),
    [
        (f"postgresql://u:{SECRET}@a:1,b/ucm?passfile=x", "a:1,b/ucm schema s"),
        (f"postgresql://u:{SECRET}@/ucm?host=/run/pg", "/run/pg/ucm schema s"),
    ],
)
def test_neither_text_nor_place_shows_a_password(dsn: str, place: str) -> None:
    settings = PostgresSettings(dsn, "s")
    assert settings.place == place
    assert SECRET not in repr(settings) + str(settings)
