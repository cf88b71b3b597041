"""Data that a training must not begin with, or must get through: the program itself, as forks."""

from faults.forks import train

SMALL = [
    "gpt_tiny",
    *("--model.num_layers", "1"),
    *("--model.hidden_size", "16"),
    *("--model.num_heads", "2"),
    *("--model.context_length", "16"),
    *("--train.steps", "1"),
    *("--train.global_batch", "4"),
    *("--train.eval_batches", "1"),
    *("--train.sample_tokens", "4"),
    *("--train.out", "run"),
]


def test_nodes_that_read_different_texts_are_refused(tmp_path):
    """The same path leads to another file on the second node."""
    nodes = []
    for rank, verse in enumerate(("to be or not to be\n", "not to be or to be\n")):
        home = tmp_path / f"node{rank}"
        home.mkdir()
        (home / "text.txt").write_text(verse * 100)
        nodes.append({"HOME": str(home), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    done = train([*SMALL, "--data.path", "~/text.txt"], cwd=tmp_path, ranks=2, env=nodes)
    assert not done.hung and not done.tracebacks and 2 in done.codes
    (line,) = done.errors
    assert "rank 1 has read other data than rank 0: data.path must lead to the same file" in line
    assert not (tmp_path / "run").exists()


def test_a_text_without_a_line_break_trains_to_its_sample(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefgh " * 500)
    cache = ["--data.path", "text.txt", "--data.cache_dir", "cache"]
    done = train([*SMALL, *cache], cwd=tmp_path)
    assert done.codes == [0] and not done.tracebacks
    assert (tmp_path / "run" / "result.txt").read_text().startswith("a")


def test_a_model_that_no_memory_holds_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefgh " * 500)
    cache = ["--data.path", "text.txt", "--data.cache_dir", "cache"]
    done = train([*SMALL, *cache, "--model.hidden_size", "2000000"], cwd=tmp_path)
    assert done.codes == [2] and not done.tracebacks
    (line,) = done.errors
    assert "the run needs at least" in line and "of memory: lower model.vocab_size" in line
    assert not (tmp_path / "run").exists()
