"""The SDK of connectors, workers, the CLI and other programs: every failure becomes a miss, in time."""
