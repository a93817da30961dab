"""What stands between an inference engine and the cache: connectors, and a replay that works as one does."""
