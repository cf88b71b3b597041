"""What builds and checks the course; run from the repository's root, never imported by labcode."""
