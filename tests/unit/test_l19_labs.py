"""What lesson 19 works with: made-up runs, files of features, tables of statistics."""

import math

import torch
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.registry import api_method

from course.labs import l19_runs as lab
from labcode.debug.feature import Feature


class Largest(Feature):
    """Logs the largest value."""

    def largest(self, tensor):
        return tensor.max().item()

    @api_method
    def inspect_tensor(self, config, layer_name, *, tensor, iteration, **_):
        MetricLogger.log_scalar(layer_name, self.largest(tensor), iteration)


def test_the_file_of_a_feature_can_be_read_by_python_and_has_all_methods(tmp_path):
    path = lab.write_feature(Largest, str(tmp_path / "features"))
    text = path.read_text()
    compile(text, str(path), "exec")
    assert text.count("    def ") == 2
    assert text.index("@Registry.register_feature") < text.index("class Largest(Feature):")
    assert "    @api_method\n    def inspect_tensor" in text


def test_made_up_runs_differ_by_rounding_and_by_their_faults():
    for number, row in enumerate(lab.made_up_rows(4, [(3, 1, math.nan), (4, 2, 1.01)])):
        for rank, (where, part) in row.parts.items():
            error = (part - row.whole[where]).norm() / max(1.0, row.whole.norm())
            if (number, rank) == (3, 1):
                assert error.isnan()
            elif (number, rank) == (4, 2):
                assert 1e-3 < error < 1e-2
            else:
                assert error < 1e-6
        together = torch.cat([part for _, part in row.parts.values()], dim=1)
        assert together.shape == row.whole.shape


def test_a_table_has_a_row_for_each_layer_and_a_column_for_each_tensor():
    found = {}
    for row, layer in enumerate(lab.LAYERS):
        for column, tensor in enumerate(lab.TENSORS):
            found[f"{layer}_{tensor}_mse", 3] = 10 * row + column
    assert lab.table(found, "mse", 3)[5] == [50, 51, 52]
