"""A whole cluster on one machine, for tests, torture and a first look: PostgreSQL, etcd, replicas and a
worker as plain processes on the loopback address.

Nothing here touches a server that it did not start. Everything that it starts ends with it: in order when it
can, and by the kernel when the starter is killed.
"""
