"""World-touching code that every daemon uses: sockets, processes, signals, the log."""
