"""Units and how to print them. GB is 1e9 bytes, GiB is 2**30: memory is sold in GiB, links in GB/s."""

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def _largest_unit(value, units):
    """The largest (size, name) that is not above |value|, else the smallest."""
    return next(((size, name) for size, name in units if abs(value) >= size), units[-1])


def si(value: float, unit: str = "") -> str:
    """A number with an SI prefix: `si(1.75e11)` is '175 G', `si(9.9e14, "FLOP/s")` is '990 TFLOP/s'."""
    size, prefix = _largest_unit(value, _SI)
    return f"{value / size:.3g} {prefix}{unit}".rstrip()


def binary_bytes(num_bytes: float) -> str:
    """Bytes in powers of two: `binary_bytes(3 * 2**30)` is '3.00 GiB'."""
    size, name = _largest_unit(num_bytes, _BINARY)
    return f"{num_bytes / size:.0f} B" if name == "B" else f"{num_bytes / size:.2f} {name}"


def seconds(duration_s: float) -> str:
    """A duration from nanoseconds to hours: '3.2 ms', '1 min 05 s', '2 h 10 min'."""
    if duration_s >= 3600:
        return f"{duration_s // 3600:.0f} h {duration_s % 3600 // 60:02.0f} min"
    if duration_s >= 60:
        return f"{duration_s // 60:.0f} min {duration_s % 60:02.0f} s"
    size, name = _largest_unit(duration_s, _TIME)
    return f"{duration_s / size:.3g} {name}"
