"""Time of `import labcode` in a fresh process: the target is below 0.1 s, without torch.

    python benchmarks/import_time.py [--rounds 9]

The median over fresh processes, timed inside each (the start of Python itself is not counted), with
the ground modules that work without torch beside it. Exits with status 1 if the target is missed.
"""

import platform
import statistics
import subprocess
import sys
from pathlib import Path

from side_by_side import options, write

RESULT = Path(__file__).parent / "results" / "import_time.json"
TARGET_S = 0.1
MODULES = ("labcode", "labcode.config", "labcode.recipes", "labcode.topology")
PROBE = """
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, "torch" in sys.modules)
"""


def probe(module: str) -> tuple[float, bool]:
    """(seconds, torch imported) of one fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, torch = done.stdout.split()
    return float(seconds), torch == "True"


def main() -> None:
    rounds = options(__doc__, rounds=9).parse_args().rounds
    rows = {}
    print("| import | ms, median | slowest | brings torch |\n|---|---:|---:|---|")
    for module in MODULES:
        found = [probe(module) for _ in range(rounds)]
        times = [seconds for seconds, _ in found]
        row = {
            "median_s": statistics.median(times),
            "slowest_s": max(times),
            "torch": any(torch for _, torch in found),
        }
        rows[module] = {
            name: round(value, 5) if name != "torch" else value for name, value in row.items()
        }
        cells = (
            module,
            f"{row['median_s'] * 1e3:.1f}",
            f"{row['slowest_s'] * 1e3:.1f}",
            "yes" if row["torch"] else "no",
        )
        print("| " + " | ".join(cells) + " |")
    record = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rounds": rounds,
        "imports": rows,
    }
    write(RESULT, record)
    if rows["labcode"]["median_s"] >= TARGET_S or any(row["torch"] for row in rows.values()):
        sys.exit(
            f"the target is missed: import labcode below {TARGET_S} s, no torch in any of these"
        )


if __name__ == "__main__":
    main()
