"""electiond decides who serves what: catalog, allocation, election, placement, routes."""
