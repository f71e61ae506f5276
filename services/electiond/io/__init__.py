"""electiond's one file."""
