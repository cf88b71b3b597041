"""Forward and backward of a step as a CUDA graph: a recorded list of kernels, started as one.

A small model has hundreds of kernels of a few microseconds each, and Python needs longer than that
to start one. The GPU waits. A CUDA graph is recorded once; after that one call starts all of it,
and Python is not asked again. What was recorded is addresses, not values:

    inputs       copied into the same memory at each step
    gradients    written to the same memory, so `.grad` is set again after zero_grad dropped it
    loss scale   a tensor, because a number would be recorded as it was

Nothing inside may wait for the GPU or change its shape.

Source: docs.pytorch.org/docs/stable/notes/cuda.html, "Whole-network capture".
Held by: tests/gpu/test_speed.py
"""

from collections.abc import Sequence

import torch

from labcode.parallel.model import Batch, ParallelModel

WARM_UP = 3  # steps before the recording: libraries choose their kernels, the allocator its memory


def leave_default_stream() -> None:
    """Make a stream of its own the current one, before the model is built.

    Autograd adds up the gradient of a weight on the stream on which its node was made. A recording
    that needs the default stream for it is ended by CUDA (cudaErrorStreamCaptureImplicit).
    """
    torch.cuda.set_stream(torch.cuda.Stream())


class GraphedStep:
    """`forward_backward` of a model that is alone on its GPU, recorded at the first call.

    Args:
        model: The model whose gradients are computed; they are not averaged.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches: list[Batch] = []
        self._scale = torch.ones(())
        self._loss = torch.zeros(())
        self._grads: dict[str, torch.Tensor] = {}

    def forward_backward(self, batches: Sequence[Batch], loss_scale: float) -> torch.Tensor:
        """Forward and backward, as `ParallelModel.forward_backward` does them.

        Raises:
            ValueError: Shapes that are not those of the first call.
        """
        if self._graph is None:
            self._batches = [(inputs.clone(), targets.clone()) for inputs, targets in batches]
            self._scale = torch.ones((), device=batches[0][0].device)
            self._graph = self._record()
        self._fill(batches, loss_scale)
        with self.model.ranges("graph"):  # forward and backward: what is in it cannot be told apart
            self._graph.replay()
        for name, param in self.model.weights.items():
            param.grad = self._grads.get(name)
        return self._loss.clone()

    def _record(self) -> torch.cuda.CUDAGraph:
        """Run a few steps beside the usual stream, then record one; no weight changes."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step()
                self._forget_gradients()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads, such as NCCL's, may go on asking the GPU
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._loss = self._step()
        for name, param in self.model.weights.items():
            if param.grad is not None:
                self._grads[name] = param.grad
        return graph

    def _step(self) -> torch.Tensor:
        """What is recorded; without what averages gradients, since there is one rank."""
        return self.model.forward_backward_alone(self._batches, self._scale)

    def _fill(self, batches: Sequence[Batch], loss_scale: float) -> None:
        self._scale.fill_(loss_scale)
        for (inputs, targets), (new_inputs, new_targets) in zip(
            self._batches, batches, strict=True
        ):
            if inputs.shape != new_inputs.shape:
                raise ValueError(
                    f"a CUDA graph of inputs {list(inputs.shape)} cannot take "
                    f"{list(new_inputs.shape)}: train without --train.cuda_graphs"
                )
            inputs.copy_(new_inputs)
            targets.copy_(new_targets)

    def _forget_gradients(self) -> None:
        for param in self.model.weights.values():
            param.grad = None
