"""The namespace of an engine's blocks: what must be equal for two engines to share them."""

from .namespace import COMPARED, Namespace, Part
from .registration import Away, Refused, Registered, register

__all__ = ["COMPARED", "Away", "Namespace", "Part", "Refused", "Registered", "register"]
