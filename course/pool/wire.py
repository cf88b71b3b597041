"""How functions, arguments and results travel between a notebook and the engines of its pool.

Plain pickle sends a function as "module and name", which an engine cannot look up when the function
was typed into a cell. cloudpickle sends the code itself with the globals that it mentions; it does
the same for classes.
"""

import contextlib
import functools
import io
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import cloudpickle
from IPython.core.autocall import ExitAutocall

loads = pickle.loads
# cloudpickle's list of modules to send by value is one for all threads.
_one_at_a_time = threading.Lock()


class _Pickler(cloudpickle.Pickler):
    """Tensors travel as CPU tensors without a graph, views without the rest of their storage."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ExitAutocall):
            return _exit, ()  # in a notebook `exit` is an object that holds the whole kernel
        torch = sys.modules.get("torch")
        functional = sys.modules.get("torch.distributed._functional_collectives")
        if functional is not None and isinstance(obj, functional.AsyncCollectiveTensor):
            obj = obj.trigger_wait()  # what a functional collective gives may still be under way
        if torch is None or type(obj) is not torch.Tensor:
            return super().reducer_override(obj)
        if obj.layout is not torch.strided or obj.is_meta:
            return super().reducer_override(obj)
        plain = obj.detach().cpu()
        if plain.untyped_storage().nbytes() > plain.numel() * plain.element_size():
            plain = plain.clone()
        plain.requires_grad_(obj.is_leaf and obj.requires_grad)
        return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _exit() -> Any:
    """What `exit` of a notebook is on a rank."""
    return sys.exit


def dumps(obj: Any) -> bytes:
    """`obj` as bytes, functions and classes of `__main__` by value."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def pack_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call as bytes.

    Raises:
        TypeError: Something in it cannot travel, such as an open file or the pool itself.
    """
    with _one_at_a_time, _by_value(_module_of(fn)):
        try:
            return dumps((fn, args, kwargs))
        except Exception as error:
            name = getattr(fn, "__name__", repr(fn))
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TypeError(
                f"{name} cannot be sent to the ranks: {reason}: pass plain values and tensors, "
                f"build the rest inside {name}"
            ) from None


def _module_of(fn: Callable[..., Any]) -> ModuleType | None:
    """The module whose source `fn` comes from, through partial and bound methods."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    function = getattr(fn, "__func__", fn)
    return sys.modules.get(getattr(function, "__module__", None) or "")


@contextlib.contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Send what `module` defines as code where the engines may not be able to import it."""
    if module is None or _importable_everywhere(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable_everywhere(module: ModuleType) -> bool:
    """Whether engines can import a module; `__main__` counts: cloudpickle sends it by value."""
    path = getattr(module, "__file__", None)
    if not path or module.__name__.partition(".")[0] in ("__main__", "labcode", "course"):
        return True
    places = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return path.startswith(tuple(places[name] for name in names))
