"""UcmMetaService: the replicated metadata service that knows every KV block of an inference fleet."""

__version__ = "0.1.0"
