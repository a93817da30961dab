"""What engines say of their own caches: their event streams, and reports of their connectors."""
