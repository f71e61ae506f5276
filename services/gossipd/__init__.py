"""gossipd decides who is in the mesh, and counts what the mesh is asked for."""
