"""What lesson 14 reads from a job that hung: stacks and the flight recorder's files."""

import pickle
from pathlib import Path

from course.labs import l14_hang

STACK = """\
Timeout (0:00:05)!
Thread 0x00007f2 (most recent call first):
  File "/lib/python3.11/threading.py", line 324 in wait

Thread 0x00007f1 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 3245 in all_reduce
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/course/runs/hang.py", line 8 in train_step
  File "<frozen runpy>", line 88 in _run_code
"""


def entry(number: int, name: str, size: int, function: str, line: int) -> dict:
    frames = [
        {"name": name, "filename": "/venv/torch/distributed/distributed_c10d.py", "line": 1},
        {"name": function, "filename": "/course/runs/hang.py", "line": line},
    ]
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": f"gloo:{name}",
        "time_created_ns": number,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 8000,
        "is_p2p": False,
    }


def write(folder: Path, rank: int, entries: list[dict]) -> None:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    dump = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries}
    (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))


def test_a_stack_is_that_of_the_main_thread_without_dull_frames(tmp_path: Path) -> None:
    (tmp_path / "stack_0").write_text(STACK)
    assert l14_hang.stacks(tmp_path).splitlines() == [
        "rank 0",
        "    all_reduce (distributed_c10d.py:3245)",
        "    train_step (hang.py:8)",
    ]


def test_the_first_difference_is_seen_in_the_table_and_by_pytorch(tmp_path: Path) -> None:
    same = entry(0, "all_reduce", 1000, "train_step", 8)
    write(tmp_path, 0, [same, entry(1, "broadcast", 1, "evaluate", 11)])
    write(tmp_path, 1, [same, entry(1, "all_reduce", 1000, "train_step", 8)])
    table = l14_hang.calls(tmp_path).splitlines()
    assert table[0].split() == ["call", "rank", "0", "rank", "1"]
    assert "broadcast [1] in evaluate, line 11" in table[2]
    assert "all_reduce [1000] in train_step, line 8" in table[2]
    said = l14_hang.analysis(tmp_path)
    assert "Collective sequence number: 2 has errors" in said
    assert "/venv" not in said and "evaluate at hang.py:11" in said
