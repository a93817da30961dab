"""The one registry of error codes on the wire (RFC 9457 `problem+json`).

A code is a promise to clients: never renamed, never reused for another meaning. `status` is the HTTP status
that goes with it, `retry` says whether the very same call may succeed later without anybody changing
anything.
"""

from typing import NamedTuple


class Problem(NamedTuple):
    """One kind of refusal: stable `code`, HTTP `status`, short `title`, and whether a later retry can
    succeed."""

    code: str
    status: int
    title: str
    retry: bool = False


_ALL = (
    # -- the request itself is wrong
    Problem("bad_request", 400, "The request cannot be understood"),
    Problem("malformed_body", 400, "The body is not valid for its content type"),
    Problem("nesting_too_deep", 400, "The body is nested too deeply"),
    Problem("unsupported_media_type", 415, "The content type is not one of the two this service reads"),
    Problem("not_acceptable", 406, "None of the accepted media types can be produced"),
    Problem("body_too_large", 413, "The body is larger than the limit"),
    Problem("header_too_large", 431, "The request line or headers are larger than the limit"),
    Problem("header_timeout", 408, "The request head did not arrive in time"),
    Problem("body_timeout", 408, "The request body did not arrive in time"),
    Problem("length_required", 411, "A body needs a Content-Length or chunked encoding"),
    Problem("not_found", 404, "No such route"),
    Problem("method_not_allowed", 405, "The route exists, the method does not"),
    Problem("unknown_field", 422, "A field is not part of this request"),
    Problem("invalid_field", 422, "A field has a wrong type or value"),
    Problem("invalid_name", 422, "A name has characters that are not allowed"),
    Problem("invalid_key", 422, "A block key is not the hex text or bytes it has to be"),
    Problem("key_length", 422, "A block key has not the length the instance was registered with"),
    Problem("empty_batch", 422, "The request names no blocks"),
    Problem("too_many_keys", 422, "The request names more blocks than one request may"),
    Problem("column_length", 422, "Columns that belong together have different lengths"),
    Problem("parent_cycle", 422, "Blocks would be their own ancestors"),
    Problem("duplicate_conflict", 422, "The same key is named twice with different parents"),
    Problem("size_mismatch", 422, "Sizes differ from the instance's fingerprint"),
    Problem("ttl_out_of_range", 422, "A time to live is outside the allowed range"),
    Problem("unknown_group", 422, "The instance has no such attention group"),
    Problem("unknown_part", 422, "The attention group has no such part"),
    Problem("mode_not_applicable", 422, "The lookup mode does not apply to the instance's attention groups"),
    Problem("invalid_fingerprint", 422, "The fingerprint contradicts itself"),
    # -- what it names is not there, or is not the caller's
    Problem("instance_unknown", 404, "No such instance"),
    Problem("tenant_unknown", 404, "No such tenant"),
    Problem("group_unknown", 404, "No such instance group"),
    Problem("storage_unknown", 404, "No such storage"),
    Problem("engine_unknown", 404, "No such engine"),
    Problem("worker_unknown", 404, "No such worker"),
    Problem("block_unknown", 404, "No such block"),
    Problem("session_unknown", 404, "No such write session"),
    Problem("task_unknown", 404, "No such task"),
    Problem(
        "reregister", 409, "The engine or worker is unknown, expired or of an old incarnation: register again"
    ),
    Problem("incarnation_retired", 409, "This incarnation was replaced by a newer one and cannot come back"),
    Problem("foreign_session", 403, "The write session belongs to another engine"),
    Problem("foreign_task", 409, "The task is held by another worker"),
    Problem("session_expired", 409, "The write session is over: its deadline passed"),
    Problem("session_aborted", 409, "The write session is over: it was aborted"),
    Problem("session_ended", 409, "The write session is over"),
    Problem("foreign_location", 422, "A location does not belong to the write session"),
    Problem("stale_generation", 409, "A location was given to another block since"),
    # -- it contradicts what is registered
    Problem("fingerprint_mismatch", 409, "The instance exists with another fingerprint"),
    Problem("group_mismatch", 409, "The instance exists in another group"),
    Problem("tenant_mismatch", 409, "The group belongs to another tenant"),
    Problem("storage_mismatch", 409, "The storage exists with another kind or options"),
    Problem("storage_owned", 409, "Another worker that is alive holds the bytes of the volatile storage"),
    Problem("in_use", 409, "Others still depend on it"),
    Problem("not_expired", 409, "The engine or worker has not expired, and its incarnation was not named"),
    Problem("instance_retiring", 409, "The instance is being removed"),
    Problem("canary_mismatch", 409, "The engine's probe block has another hash than the instance's"),
    Problem(
        "hash_space_mixed", 409, "Instances of one routing group would give the same tokens different hashes"
    ),
    Problem("not_published", 409, "Routers are not told of this instance"),
    Problem("events_off", 409, "This replica publishes no cache events"),
    # -- not now
    Problem("not_leader", 421, "Another replica leads the shard"),
    Problem("overloaded", 503, "Too many requests at once", True),
    Problem("not_ready", 503, "The service is starting, stopping or not leading", True),
    Problem("journal_unavailable", 503, "The journal cannot take writes now", True),
    Problem("events_unavailable", 503, "The publisher of cache events does not answer now", True),
    Problem("too_many_sessions", 503, "Too many write sessions are open", True),
    Problem("too_many_leases", 503, "Too many read leases are open", True),
    Problem("registry_full", 409, "The limit of registered names of this kind is reached"),
    Problem("internal", 500, "A fault of this service"),
)

PROBLEMS: dict[str, Problem] = {problem.code: problem for problem in _ALL}
assert len(PROBLEMS) == len(_ALL), "an error code is registered twice"
