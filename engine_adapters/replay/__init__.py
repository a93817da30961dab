"""Engines without a model: they replay prompts through the service and check every byte that they load."""
