"""NVIDIA DALI as what normalises weather, on the GPU where there is one. It is optional.

    threads of Python     DALI's pipeline, on the device
    sample(number)    ->  - mean -> / std -> + sun, + weights of the rows

A sample is read and cut by `WeatherDataset.sample`, since only whoever reads a file can leave out
the chunks that a part does not need; zarr and HDF5 are not among the formats that DALI reads. What
is computed with it is DALI's, and the same as ours, number by number.

Source: docs.nvidia.com/deeplearning/dali, "External Source Operator" and "Mathematical
    Expressions".
"""

import importlib
import warnings
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from labcode.config import LoaderConfig
from labcode.data.errors import DataError
from labcode.data.weather import Sample, WeatherDataset

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets

# what the threads hand to the pipeline, one array a sample, and how DALI calls their axes
INPUTS = (
    ("states", "FCHW"),
    ("sun", "CHW"),
    ("weights", "CHW"),
)


class DaliSource:
    """The batches of a pipeline, as a source of `loader.Loader`.

    Args:
        reader: `loader.StepReader` of a `WeatherDataset`.
        config: `workers` threads read samples, and as many compute where the pipeline is on the
            CPU; `prefetch` steps are begun ahead.
        device: Device that the batches come out on.

    Raises:
        ValueError: DALI is not installed, or this is no weather.

    Held by: tests/unit/test_dali.py
    """

    def __init__(self, reader: Any, config: LoaderConfig, device: torch.device) -> None:
        self._dali = _imported()
        if not isinstance(reader.dataset, WeatherDataset):
            raise ValueError(
                f"loader.backend=dali reads weather, not {type(reader.dataset).__name__}: "
                "use --loader.backend torch"
            )
        self.reader = reader
        self.threads = max(1, config.workers)
        self.prefetch = config.prefetch
        self.device = device
        self._pool: ThreadPoolExecutor | None = None
        self._pipeline: Any = None
        self._reading: deque[list[Future[Sample]]] = deque()
        self._next_read = 0
        self._failed: deque[Exception | None] = deque()

    def begin(self, step: int) -> None:
        """The next batch is that of this step, from a pipeline of its own."""
        self.close()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="loader")
        self._next_read = step
        self._pipeline = self._make_pipeline()

    def next(self) -> list[Batch]:
        """The batch of the next step.

        Raises:
            DataError: A sample cannot be read.
        """
        inputs, targets = self._pipeline.run()
        error = self._failed.popleft()
        if error is not None:
            raise DataError(str(error)) from error
        num_parts = self.reader.num_parts
        # contiguous parts, the first ones longer, as those of numpy.array_split
        return list(
            zip(
                torch.tensor_split(self._as_torch(inputs), num_parts),
                torch.tensor_split(self._as_torch(targets), num_parts),
            )
        )

    def close(self) -> None:
        """End the threads and the pipeline."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._pipeline = None
        self._reading.clear()
        self._failed.clear()

    def _as_torch(self, batch: Any) -> torch.Tensor:
        """A copy, as DALI uses its memory again for the next batch."""
        copied = torch.from_dlpack(batch.as_tensor()).clone()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return copied

    # ---- reading

    def _read_ahead(self) -> None:
        """Let the threads begin with the samples of the steps that come next."""
        assert self._pool is not None
        while len(self._reading) <= self.prefetch:
            data, parts = self.reader.parts(self._next_read)
            futures = []
            for number in np.concatenate(parts):
                futures.append(self._pool.submit(data.sample, int(number)))
            self._reading.append(futures)
            self._next_read += 1

    def _next_inputs(self) -> tuple[list[np.ndarray], ...]:
        """The samples of a step, as DALI asks for them: `prefetch` steps before the loop does.

        A sample that cannot be read becomes one of zeros, and an error when the loop gets there.
        """
        self._read_ahead()
        samples = []
        error: Exception | None = None
        for future in self._reading.popleft():
            try:
                samples.append(future.result())
            except ValueError as found:
                error = error or found
                samples.append(self._nothing())
        self._failed.append(error)
        self._read_ahead()
        arrays = [self._arrays(sample) for sample in samples]
        return tuple(list(column) for column in zip(*arrays))

    def _nothing(self) -> Sample:
        dataset = self.reader.dataset
        shape = dataset.sample_shape
        states = np.zeros((2, len(dataset.variables), *shape), np.float32)
        sun = np.zeros((2, *shape), np.float32) if dataset.forcings else None
        return Sample(states, sun, np.zeros(shape[0], np.float32))

    def _arrays(self, sample: Sample) -> Sequence[np.ndarray]:
        """A sample as `INPUTS` has it."""
        shape = self.reader.dataset.sample_shape
        sun = np.zeros((2, *shape), np.float32) if sample.sun is None else sample.sun
        weights = np.broadcast_to(sample.weights[None, :, None], (1, *shape))
        arrays = (sample.states, sun, weights)
        return [np.ascontiguousarray(array) for array in arrays]

    # ---- computing

    def _make_pipeline(self) -> Any:
        dali = self._dali
        on_gpu = self.device.type == "cuda"
        dataset = self.reader.dataset
        pipeline = dali.Pipeline(
            batch_size=len(np.concatenate(self.reader.parts(0)[1])),
            num_threads=self.threads,
            device_id=(self.device.index or 0) if on_gpu else None,
            prefetch_queue_depth=self.prefetch,
        )
        with pipeline:
            read = dali.fn.external_source(
                self._next_inputs,
                num_outputs=len(INPUTS),
                dtype=[dali.types.FLOAT] * len(INPUTS),
                layout=[layout for _, layout in INPUTS],
            )
            states, sun, weights = [array.gpu() for array in read] if on_gpu else read
            where = "gpu" if on_gpu else "cpu"
            mean = dali.types.Constant(dataset.statistics.mean.numpy()[None], device=where)
            std = dali.types.Constant(dataset.statistics.std.numpy()[None], device=where)
            states = (states - mean) / std
            inputs, targets = states[0], states[1]
            if dataset.forcings:
                inputs = dali.fn.cat(inputs, sun, axis=0)
            if dataset.brings_weights:
                targets = dali.fn.cat(targets, weights, axis=0)
            pipeline.set_outputs(inputs, targets)
        with warnings.catch_warnings():
            # about outputs of the source that nobody asks for, which are small
            warnings.simplefilter("ignore")
            pipeline.build()
        return pipeline


def _imported() -> Any:
    """The package.

    Raises:
        ValueError: It is not installed.
    """
    try:
        dali = importlib.import_module("nvidia.dali")
        for part in ("fn", "types"):
            importlib.import_module(f"nvidia.dali.{part}")
    except ImportError as error:
        raise ValueError(
            "loader.backend=dali needs NVIDIA DALI, which is not installed: "
            "pip install labcode[dali], or use --loader.backend torch"
        ) from error
    return dali
