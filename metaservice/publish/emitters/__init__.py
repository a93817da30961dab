"""Emitters: one dialect of cache events each, over the same windows."""
