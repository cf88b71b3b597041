"""Where precision is lost and who lost it: features on layers, records, comparison."""
