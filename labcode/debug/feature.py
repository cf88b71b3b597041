"""What every debug feature begins with, those of one's own too; importing it registers nothing.

Held by: tests/ranks/test_debug.py::test_a_training_writes_what_its_yaml_asks_for
"""

from typing import Any

from nvdlfw_inspect.base import BaseConfigAPIMapper

from labcode.debug.debug_config import spread


class Feature(BaseConfigAPIMapper):
    """Which tensors and which products the settings of a feature name."""

    def parse_config_and_api(self, config: dict, **kwargs: Any) -> tuple[bool, dict | None]:
        """Whether the settings are for this call, and what they are for its product and tensor."""
        for entry in spread(config):
            gemm = entry.get("gemm")
            tensor = entry.get("tensor")
            if gemm in (None, kwargs.get("gemm")) and tensor in (None, kwargs.get("tensor_name")):
                return True, entry
        return False, None
