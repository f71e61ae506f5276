"""Key file, sockets and interfaces of tunneld."""
