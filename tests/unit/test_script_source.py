"""The file of a learner's script knows all names that its function uses."""

from labcode.teach.exercises.scripts import missing_names

HEADER = "import torch\nfrom somewhere import build_model as make\n"
KNOWN = """
def main(folder):
    import math
    from time import sleep
    scale = 2

    def inner(x):
        return math.pi * x * scale

    with open(folder) as file, torch.no_grad():
        numbers = [inner(line) for line in file]
    try:
        make(numbers)
    except ValueError as error:
        print(error, __name__)
    sleep(0)
"""


def test_names_of_the_header_and_of_the_function_are_known():
    assert missing_names(KNOWN, HEADER) == []


def test_names_that_no_line_defines_are_missing():
    source = KNOWN.replace("sleep(0)", "setup(np.zeros(3))")
    assert missing_names(source, HEADER) == ["np", "setup"]
