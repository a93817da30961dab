"""The journal port and its stores: events in order, durable, checked on every read."""
