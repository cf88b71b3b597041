"""What can be wrong with samples while a training reads them."""


class DataError(ValueError):
    """A sample cannot be read; only the ranks that read it know."""
