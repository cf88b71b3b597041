"""What a run stands on: its settings, its processes, how they find each other and agree."""
