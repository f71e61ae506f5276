"""The command line of a node: a client of supervisord, the bus and the HTTP ports. It decides nothing."""
