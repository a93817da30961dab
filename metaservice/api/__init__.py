"""The HTTP face of the service: guards, decoding, one call of the shard, encoding.

No rule of the domain lives here.
"""
