"""Where settings come from: flags, the environment, and a file in TOML. Each gives values of the right kind
with the place they were set at, or a ConfigError that names the place, what is wrong, and what would be
right."""

import argparse
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from metaservice.config.secrets import SECRETS
from metaservice.config.settings import SETTINGS, ConfigError, Setting

PREFIX = "UCM_"
FILE_VARIABLE = "UCM_CONFIG"
OTHERS = frozenset({FILE_VARIABLE, "UCM_URL"})
"""Variables with the prefix that are no settings of `serve`."""

SERVICE_LINK = re.compile(
    r"UCM_(?:\w+_)?(?:SERVICE_(?:HOST|PORT(?:_\w+)?)|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)"
)
SERVICE_PORT = re.compile(r"(?:tcp|udp|sctp)://.*", re.DOTALL)

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_EXPECTED = {
    "integer": "an integer",
    "number": "a number",
    "text": "a text",
    "switch": "true or false",
    "path": "a path",
    "list": "a list of texts",
}
_UNITS = {"_ms": "milliseconds", "_bytes": "bytes", "_permille": "thousandths"}


class Given(NamedTuple):
    """One setting as it was given."""

    value: Any
    origin: str
    """`flag`, the name of a variable, or `file:line`."""


class Flags(NamedTuple):
    """The command line."""

    given: dict[str, Given]
    file: Path | None
    check_config: bool


# --- flags ---------------------------------------------------------------------------------------------


def from_flags(arguments: Sequence[str]) -> Flags:
    """Raises ConfigError, and SystemExit for `--help` and a flag without its value."""
    parsed, rest = _parser().parse_known_args(arguments)
    if rest:
        raise ConfigError(_stray(rest))
    values: dict[str, Any] = vars(parsed)
    file, check_config = values.pop("config"), values.pop("check_config")
    given = {
        name: Given(value if SETTINGS[name].kind == "switch" else _read(SETTINGS[name], value, ""), "flag")
        for name, value in values.items()
    }
    return Flags(given, file, check_config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ucm-meta serve",
        description="Run one replica of the metadata service. A setting is taken from its flag, else from "
        f"the environment ({PREFIX}HEARTBEAT_MS for --heartbeat-ms), else from the file (heartbeat_ms), else "
        "it has its default.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=140),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", type=Path, default=None, metavar="FILE", help=f"settings in TOML; also {FILE_VARIABLE}"
    )
    parser.add_argument(
        "--check-config",
        action="store_true",
        default=False,
        help="check all settings, print each with the place it was set at, and exit",
    )
    groups: dict[str, Any] = {}
    for setting in SETTINGS.values():
        group = groups.get(setting.group) or parser.add_argument_group(setting.group)
        groups[setting.group] = group
        text = (
            f"{setting.text} (default: {shown_default(setting)})" if shown_default(setting) else setting.text
        )
        if setting.kind == "switch":
            group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(setting.flag, metavar=_metavar(setting), help=text.replace("%", "%%"))
    return parser


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(setting.choices)
    return "URL,URL" if setting.kind == "list" else setting.name.rsplit("_", maxsplit=1)[-1].upper()


def shown_default(setting: Setting) -> str:
    """The default as it is documented; empty where there is none."""
    if setting.kind == "switch":
        return "on" if setting.default else "off"
    return "" if setting.default in (None, "", ()) else str(setting.default)


def _stray(rest: Sequence[str]) -> str:
    """What is wrong with arguments nobody knows. A value is not repeated: it may be a secret."""
    for word in rest:
        if word.startswith("--"):
            name = word.partition("=")[0]
            flags = [setting.flag for setting in SETTINGS.values()]
            return f"there is no flag {name}{_nearest(name, [*flags, '--config', '--check-config'])}"
    return "an argument has no flag before it; settings are given as --name VALUE"


# --- environment ---------------------------------------------------------------------------------------


def from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    """The variables named `UCM_...`. What Kubernetes sets for a Service whose name begins with `ucm` is told
    by its shape and left alone; any other unknown one is refused."""
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    given: dict[str, Given] = {}
    for variable in sorted(environment):
        text = environment[variable]
        if not variable.startswith(PREFIX) or variable in OTHERS or _is_service_link(variable, text):
            continue
        setting = by_variable.get(variable)
        if setting is None:
            near = _nearest(variable, [*by_variable, FILE_VARIABLE])
            raise ConfigError(f"environment: there is no setting {variable}{near}")
        given[setting.name] = Given(_read(setting, text, variable), variable)
    return given


def _is_service_link(variable: str, text: str) -> bool:
    if SERVICE_LINK.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and SERVICE_PORT.fullmatch(text) is not None


def _read(setting: Setting, text: str, variable: str) -> Any:
    """A value written as text, in a flag or in a variable."""
    try:
        match setting.kind:
            case "integer":
                return int(text)
            case "number":
                return float(text)
            case "path":
                return Path(text) if text else None
            case "list":
                return tuple(part for piece in text.split(",") if (part := piece.strip()))
            case "switch":
                return _WORDS[text.strip().lower()]
            case _:
                return text
    except (ValueError, KeyError):
        name = f"environment: {variable}" if variable else setting.flag
        raise ConfigError(f"{name} is {text!r}; expected {_expected(setting)}") from None


# --- file ----------------------------------------------------------------------------------------------


def from_file(path: Path) -> dict[str, Given]:
    """The keys of a TOML file. Raises ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    lines = _lines(text, table)
    given: dict[str, Given] = {}
    for key, value in table.items():
        origin = f"{path}:{lines[key]}" if key in lines else str(path)
        setting = SETTINGS.get(key)
        if setting is None:
            raise ConfigError(f"{origin}: there is no setting {key}{_of_table(key, value)}")
        given[key] = Given(_of_toml(setting, value, origin), origin)
    return given


def _of_table(key: str, value: object) -> str:
    if isinstance(value, dict):
        return f"; settings are not in tables: write them without [{key}]"
    return _nearest(key.replace("-", "_"), SETTINGS)


def _of_toml(setting: Setting, value: object, origin: str) -> Any:
    match setting.kind, value:
        case "switch", bool():
            return value
        case "integer", int() if not isinstance(value, bool):
            return value
        case "number", int() | float() if not isinstance(value, bool):
            return float(value)
        case "text", str():
            return value
        case "path", str():
            return Path(value) if value else None
        case "list", list() if all(isinstance(item, str) for item in value):
            return tuple(value)
    was = "" if setting.name in SECRETS else f" {value!r},"
    raise ConfigError(
        f"{origin}: {setting.name} is{was} {_kind(value)}; expected {_expected(setting)}, such as "
        f"{setting.name} = {_example(setting)}"
    )


def _kind(value: object) -> str:
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), "a date or time")


def _expected(setting: Setting) -> str:
    if setting.choices:
        return f"one of {', '.join(setting.choices)}"
    unit = next((unit for suffix, unit in _UNITS.items() if suffix in setting.name), "")
    unit = f" ({unit})" if unit and setting.kind == "integer" else ""
    return _EXPECTED[setting.kind] + unit


def _example(setting: Setting) -> str:
    examples = {"list": '["https://etcd-1:2379"]', "text": '"..."', "path": '"/etc/ucm/file"'}
    if setting.kind in examples:
        return examples[setting.kind]
    return str(setting.default).lower()


def _lines(text: str, keys: Iterable[str]) -> dict[str, int]:
    """The line at which each top-level key is set. A line that only looks like it, inside a text of several
    lines, does not count: what is before it is no whole document."""
    wanted = set(keys)
    rows = text.splitlines()
    found: dict[str, int] = {}
    for number, row in enumerate(rows):
        head = re.match(r"""\s*\[*\s*["']?([A-Za-z0-9_-]+)["']?\s*[=.\]]""", row)
        if head is None or head[1] not in wanted or head[1] in found:
            continue
        try:
            tomllib.loads("\n".join(rows[:number]))
        except tomllib.TOMLDecodeError:
            continue
        found[head[1]] = number + 1
    return found


def _nearest(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
