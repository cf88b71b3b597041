"""Tools that build and check the course; run from the root of the repository, never imported by labcode."""
