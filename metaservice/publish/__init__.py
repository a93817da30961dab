"""Cache events for routers: streams out, engines' own events in, and answers to those who ask.

All of it runs in a process of its own beside the replica (`process`, started by `host`), so that no router
costs a lookup anything. The replica feeds it what the journal says (`feed`).
"""
