"""Who leads which shard: one port (`port.py`), and what keeps the answer: nothing (`single.py`), the database
(`sql_lease.py`), etcd (`etcd.py`), or memory for tests and the simulator (`memory.py`)."""
