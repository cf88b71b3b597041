"""Numbers of few bits: formats, FP8 layers, and tools that find where precision is lost."""
