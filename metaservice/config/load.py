"""All settings of a process, from all their sources: a flag wins over the environment, that over the file,
that over what follows from other settings, and that over the default."""

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metaservice.config.laws import check, check_files
from metaservice.config.settings import SETTINGS, Config, make
from metaservice.config.sources import FILE_VARIABLE, Given, from_environment, from_file, from_flags


class Loaded(NamedTuple):
    """A checked Config, and where each of its settings comes from."""

    config: Config
    origins: dict[str, str]
    """By name of the setting; what has its default is absent."""
    check_config: bool
    """Whether only that was asked for."""


def load(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Loaded:
    """Raises ConfigError, and SystemExit for `--help` and a flag without its value."""
    environment = os.environ if environment is None else environment
    flags = from_flags(arguments)
    file = flags.file or (Path(named) if (named := environment.get(FILE_VARIABLE)) else None)
    given: dict[str, Given] = from_file(file) if file is not None else {}
    given |= from_environment(environment)
    given |= flags.given
    values = {name: row.value for name, row in given.items() if row.value is not None}
    origins = {name: given[name].origin for name in values}
    for name, (value, why) in follows(values).items():
        values[name] = value
        origins[name] = why
    if values["advertise"].endswith("/"):
        values["advertise"] = values["advertise"].rstrip("/")
    config = make(values)
    check(config, origins)
    return Loaded(config, origins, flags.check_config)


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """The settings of `serve`. Raises ConfigError for what cannot work, and SystemExit for `--help`,
    `--check-config` (which prints them) and a flag without its value."""
    from metaservice.config.document import effective  # noqa: PLC0415 - only for who asks

    loaded = load(arguments, environment)
    if loaded.check_config:
        check_files(loaded.config, loaded.origins)
        sys.stdout.write(effective(loaded.config, loaded.origins))
        raise SystemExit(0)
    return loaded.config


def follows(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What was not given and follows from what was: name -> (value, from what). With replicas, limits that
    were not given keep the timing laws."""

    def of(name: str) -> Any:
        return values.get(name, SETTINGS[name].default)

    found: dict[str, tuple[Any, str]] = {}
    if not values.get("replica"):
        found["replica"] = (_replica(of("port")), "host name and port")
    if not values.get("advertise"):
        found["advertise"] = (
            _url(of("host"), of("port")),
            "host and port" if of("port") else "the bound port",
        )
    if of("leadership") != "single":
        ttl = of("lead_ttl_ms")
        if "lead_ttl_ms" in values:
            found |= {
                name: (ttl * SETTINGS[name].default // SETTINGS["lead_ttl_ms"].default, "lead_ttl_ms")
                for name in ("lead_renew_ms", "lead_timeout_ms", "lead_margin_ms")
                if name not in values
            }
        needed = {
            "write_ttl_ms_min": (2 * ttl, "2 * lead_ttl_ms"),
            "write_ttl_ms_default": (max(of("write_ttl_ms_min"), 2 * ttl), "write_ttl_ms_min"),
            "expire_ms": (2 * ttl, "2 * lead_ttl_ms"),
            "reclaim_delay_ms": (ttl + of("staleness_ms_max"), "lead_ttl_ms + staleness_ms_max"),
        }
        for name, (least, why) in needed.items():
            if name not in values and least > SETTINGS[name].default:
                found[name] = (least, why)
    return found


def _replica(port: int) -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "replica"
    return f"{host}-{port}"


def _url(host: str, port: int) -> str:
    if not port:
        return ""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
