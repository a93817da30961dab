"""Moves and deletes the bytes that the service only knows of; sees `metaservice.client` and `wire`."""
