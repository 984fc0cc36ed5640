"""No AMX in the engines of the tests. PYTHONPATH names this folder, so Python runs this file in all of them.

Where a CPU has AMX, vLLM 0.32 chooses its own AMX kernels and does not ask Linux for the tile state first. An engine
whose first computation is attention ends with an illegal instruction, with or without kvflow. And in bfloat16 the
tokens of a request then depend on the requests beside it, which no proof of equal tokens survives. Each
process asks all the same, so that a kernel which looks at the CPU itself does not end it.
"""

import importlib.abc
import importlib.machinery
import sys

MODULE = "torch.cpu"


class WithoutAmx(importlib.abc.MetaPathFinder):
    """Have ``torch.cpu`` say that there is no AMX, from the moment when it is imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                module._init_amx()  # does nothing where there is no AMX
                module._is_amx_tile_supported = lambda: False

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, WithoutAmx())
