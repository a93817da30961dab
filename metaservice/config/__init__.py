"""Configuration: every setting with its default, its check, and the laws that hold between them.

A setting comes from a flag, the environment, a file, or its default, in this order.
"""

from metaservice.config.laws import check
from metaservice.config.load import Loaded, load, parse
from metaservice.config.secrets import redact
from metaservice.config.settings import CLOCK_STEP_MS, Config, ConfigError

__all__ = ["CLOCK_STEP_MS", "Config", "ConfigError", "Loaded", "check", "load", "parse", "redact"]
