"""Outcome codes as the core writes them into byte columns. A unit test holds them equal to the wire's
enumerations."""

from enum import IntEnum


class WriteOutcome(IntEnum):
    """Per key of a start-write."""

    write = 0
    present = 1
    in_progress = 2
    refused = 3


class RefusedReason(IntEnum):
    """Why a key of a start-write was refused."""

    none = 0
    quota_tenant = 1
    quota_group = 2
    quota_instance = 3
    storage_full = 4
    deletion_backlog = 5
    switch = 6
    parent_mismatch = 7
    no_storage = 8


class FinishStatus(IntEnum):
    """Per location of a finish."""

    serving = 0
    pending = 1
    freed = 2
    removed = 3


class RemoveOutcome(IntEnum):
    """Per key of a remove."""

    absent = 0
    removed = 1
    waiting_for_lease = 2


class LeaseOutcome(IntEnum):
    """Per lease of a renew or release."""

    renewed = 0
    released = 1
    expired = 2
    unknown = 3
