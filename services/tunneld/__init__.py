"""tunneld owns the node key, the mesh port and every byte between nodes. It decides nothing."""
