"""Which version the engine's weights have, by what an operator says."""

import logging
from pathlib import Path
from secrets import token_hex

from engine_adapters.vllm.settings import Settings, SettingsRefused

log = logging.getLogger("ucm.vllm")

_LENGTH_MAX = 256


class Weights:
    """Follows `weight_version` and `weight_version_file`. KV of other weights is wrong output, so where it is
    not known whether the weights are still the same, they count as changed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._told = self._version = self._read()

    def version(self) -> str:
        """The version now; the namespace has it."""
        return self._version

    def renewed(self) -> str:
        """The version after vLLM reset its caches: what the file says now, or one of this engine alone."""
        try:
            told = self._read()
        except SettingsRefused as refused:
            log.warning("%s", refused)
            told = self._told
        if told != self._told:
            self._told = self._version = told
        else:
            self._version = f"{told}+reset-{token_hex(8)}"
            log.warning(
                "the caches were reset and the weights' version is not known to have changed: this engine "
                "shares its cache with no other until it restarts; write the version to "
                "weight_version_file before a reset"
            )
        return self._version

    def _read(self) -> str:
        """What the setting or the file says. Raises SettingsRefused."""
        name = self._settings.weight_version_file
        if not name:
            return self._settings.weight_version
        try:
            text = Path(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsRefused(f"kv_connector_extra_config.weight_version_file: {name}: {error}") from None
        if len(text) > _LENGTH_MAX or not text.isprintable():
            raise SettingsRefused(
                f"kv_connector_extra_config.weight_version_file: {name}: expected at most {_LENGTH_MAX} "
                "printable characters"
            )
        return text
