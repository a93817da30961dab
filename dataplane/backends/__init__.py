"""One module per kind of storage; all pass one conformance suite."""
