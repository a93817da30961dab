"""The only stateful asynchronous room: sequencer, snapshots and the shard that serves a core."""
