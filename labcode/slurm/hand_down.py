"""`python -m labcode.slurm.hand_down` prints `script/hand_down.sh`, for a job script to run.

    hand_down=$(python -m labcode.slurm.hand_down)
    srun bash -c "$hand_down" NAME COMMAND...

The job script asks labcode for the text, wherever it is installed, also inside a container. Where
it is not, Python says so before any rank is started, and strict mode ends the script.
"""

from pathlib import Path

PATH = Path(__file__).parent / "script/hand_down.sh"


if __name__ == "__main__":
    print(PATH.read_text(encoding="utf-8"), end="")
