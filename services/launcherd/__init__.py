"""launcherd decides what runs here: slots, leases, the load queue and eviction."""
