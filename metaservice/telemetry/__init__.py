"""What the service tells about itself: counters for Prometheus, spans for OpenTelemetry.

Nothing waits for either.
"""
