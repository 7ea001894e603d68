"""zmqueue: a message queue in Python, over ZeroMQ, with its metadata in Raft."""

__version__ = "0.1.0"
