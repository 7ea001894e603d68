"""The shell around the core: sockets, files, Raft and the clock. It performs what the core decides, and no more."""
