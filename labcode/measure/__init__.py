"""How long a step takes, how much it needs, and which rank is slow."""
