"""Moves and deletes the bytes that the service only knows of; sees `metaservice.client` and `wire`."""

from dataplane.port import (
    Backend,
    Capabilities,
    DataPlaneError,
    DeleteFailed,
    Found,
    OpenFailed,
    Place,
    ReadRefused,
    ScanFailed,
    WriteFailed,
)
from dataplane.registry import open_backend

__all__ = [
    "Backend",
    "Capabilities",
    "DataPlaneError",
    "DeleteFailed",
    "Found",
    "OpenFailed",
    "Place",
    "ReadRefused",
    "ScanFailed",
    "WriteFailed",
    "open_backend",
]
