"""What every debug feature begins with, those of one's own too; importing it registers nothing.

Held by: tests/ranks/test_debug.py::test_a_training_writes_what_its_yaml_asks_for
"""

import copy
from typing import Any

from nvdlfw_inspect.base import BaseConfigAPIMapper


class Feature(BaseConfigAPIMapper):
    """Which tensors and which products the settings of a feature name."""

    def parse_config_and_api(self, config: dict, **kwargs: Any) -> tuple[bool, dict | None]:
        """Whether the settings are for this call, and what they are for its tensor."""
        own = copy.deepcopy(config)
        if "gemms" in own and kwargs.get("gemm") not in own["gemms"]:
            return False, None
        if "tensors" in own or "tensors_struct" in own:
            found = self._process_tensor_config(own, kwargs["tensor_name"])
            return found is not None, found
        return True, own
