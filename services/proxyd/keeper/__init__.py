"""The keeper: a small process that holds proxyd's listening sockets, so that no restart refuses a connection."""
