"""`bin/bench`: measures a real node, and the proxies people compare it with, in one run.

What it measures and how it stays honest is told in the modules: `figures` (what a figure is, and the statistics),
`load` (the client), `upstream` (the stand-in engine), `peers` (the other proxies), `mesh` (our node),
`proxy` and `node` (the benches).
"""
