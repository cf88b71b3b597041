"""From a config to a finished run: its folder, attempts, failures, sweeps."""
