"""gossipd's files."""
