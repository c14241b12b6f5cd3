"""HTTP in front of a daemon: a process of its own that speaks the wire protocol, so nobody who looks stalls it."""
