"""Where notebooks of an older copy of the course look for its first cell; it says what to do."""

raise ImportError(
    "this notebook is of an older copy of the course: labcode.lab and labcode.teach are in the "
    "package course now. Replace `labcode.lab` by `course.lab` and `labcode.teach` by `course` "
    "in it (Edit, Find), or begin the lesson anew: `python -m labcode reset 04`, which keeps yours"
)
