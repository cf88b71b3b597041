"""The order of the tests: what runs in the background begins early, and whoever needs it comes late."""

import hypothesis

hypothesis.settings.register_profile("course", deadline=None)  # no test is timed
hypothesis.settings.load_profile("course")

# a test is put at the longest entry that its id begins with; those of one entry keep their order
ORDER = (
    "tests/notebooks/test_lessons.py::test_there_are_lessons",  # starts all lessons, two runs each
    "tests/unit",
    "tests/notebooks",
    "tests/gpu",
    "tests/ranks",
    "tests/ranks/test_recipes_learn.py::test_both_train",  # starts two trainings that only need time
    "tests/slurm/test_training.py::test_an_array",  # starts the jobs that wait for time limits and lost nodes
    "tests/slurm",
)
LAST = (
    "tests/ranks/test_recipes_learn.py::test_gpt_tiny",
    "tests/ranks/test_recipes_learn.py::test_vit_tiny",
    "tests/slurm/test_training.py::test_near_its_time_limit",
    "tests/slurm/test_training.py::test_a_node_that_loses_power",
)


def pytest_collection_modifyitems(items):
    def place(item):
        if item.nodeid.startswith(LAST):
            return len(ORDER)
        fitting = [
            (len(entry), number)
            for number, entry in enumerate(ORDER)
            if item.nodeid.startswith(entry)
        ]
        return max(fitting, default=(0, 0))[1]

    items.sort(key=place)
