"""The `ucm-meta` command."""
