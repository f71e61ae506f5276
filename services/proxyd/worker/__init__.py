"""The worker: the process that serves both HTTP ports. Its stub is what supervisord sees."""
