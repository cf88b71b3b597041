"""What the check of exercise 4.4 reads in a script: unknown names, and what stays on the CPU."""

import pytest

from labcode.teach.exercises.script_source import missing_names, what_stays_on_the_cpu

SCRIPT = """
def main(folder):
    device = torch.device("cuda")
    model = Wrapped(build_model().to(device))
    for epoch in range(2):
        total = torch.zeros(()).to(device)
        for x, y in loader:
            LOSS
            loss.backward()
            total += loss.to(device)
"""
PLAIN = "loss = f(model(x), y)"


def script(loss=PLAIN, **changes):
    text = SCRIPT.replace("LOSS", loss)
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    return text


RIGHT = {
    "both": script("loss = f(model(x.to(device)), y.to(device))"),
    "cuda": script("x = x.cuda(0); y = y.cuda(0); loss = f(model(x), y)"),
    "where there are GPUs": script("if on_gpus: x, y = x.cuda(), y.cuda()"),
    "a comprehension": script("x, y = [part.to(device) for part in (x, y)]"),
    "a map": script("x, y = map(lambda part: part.to(device), (x, y))"),
    "a helper": script("x, y = move((x, y))"),
    "torch.as_tensor": script(
        "x = torch.as_tensor(x, device=device); y = torch.as_tensor(y, device=device)"
    ),
    "both at once": script("x, y = torch.stack([x, y]).to(device)"),
    "parts of a batch": script(
        "x = batch[0].to(device); y = batch[1].to(device)", names=("x, y in", "batch in")
    ),
    "on the way to the loop": script(
        wrapped=("in loader:", "in (tuple(part.to(device) for part in one) for one in loader):")
    ),
    "a function in main": script(
        "x, y = put(x), put(y)",
        put=("    model =", "    def put(x):\n        return x.to(device)\n    model ="),
    ),
    "all data before": script(data=("    model =", "    data = dataset.to(device)\n    model =")),
    "by DDP, and the targets": script(
        "loss = f(model(x), y.to(device))", ddp=(".to(device))\n", ".to(device), device_ids=[0])\n")
    ),
    "no loop": "def main(folder):\n    train()\n",
}
WRONG = {
    "nothing": (script(), "the batches"),
    "the result": (script("loss = f(model(x), y).to(device)"), "the batches"),
    "zeros": (script("z = torch.zeros(1, device=device)"), "the batches"),
    "inputs only": (script("x = x.to(device)"), "what a batch holds besides `x`"),
    "inputs by DDP": (
        script(ddp=(".to(device))\n", ".to(device), device_ids=[0])\n")),
        "the targets",
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_batch_that_is_moved_is_seen(case):
    assert what_stays_on_the_cpu(RIGHT[case]) == ""


@pytest.mark.parametrize("case", WRONG)
def test_what_stays_on_the_cpu_is_named(case):
    source, left = WRONG[case]
    assert what_stays_on_the_cpu(source) == left


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
