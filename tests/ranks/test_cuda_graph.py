"""What is around a CUDA graph, without a GPU: a stand-in runs the recorded step again.

It shows that inputs, scale and gradients are those of each step. Whether a GPU can record the step
is seen in tests/gpu/test_speed.py.
"""

import pytest
import torch


def graphed_and_plain(rank):
    """[(loss, gradient) without a graph and with one, for three batches and scales]."""
    import contextlib
    from unittest import mock

    from labcode.comm.grid import Grid
    from labcode.config import GPTConfig
    from labcode.models.gpt import GPT
    from labcode.models.layers import initialize
    from labcode.models.parallelize import parallelize
    from labcode.topology import GridShape
    from labcode.train.cuda_graph import GraphedStep

    config = GPTConfig(vocab_size=24, context_length=8, num_layers=2, num_heads=2, hidden_size=8)
    model = parallelize(initialize(GPT(config).double(), 0), Grid.create(GridShape()))
    graphed = GraphedStep(model)

    class StandIn:
        """Writes the loss and the gradients of the inputs as they are now, in place."""

        def replay(self):
            old = dict(graphed._grads)
            graphed._forget_gradients()
            graphed._loss.copy_(graphed._step())
            for name, param in model.weights.items():
                old[name].copy_(param.grad)
            graphed._forget_gradients()

    def nothing(*args, **kwargs):
        return contextlib.nullcontext()

    found = []
    with (
        mock.patch.multiple(torch.cuda, Stream=mock.DEFAULT, current_stream=mock.DEFAULT),
        mock.patch.multiple(torch.cuda, stream=nothing, graph=nothing, CUDAGraph=StandIn),
    ):
        for number, scale in enumerate((1.0, 4.0, 0.5)):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(24, (4, 9), generator=generator)
            batches = [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(2)]
            for forward_backward in (model.forward_backward, graphed.forward_backward):
                loss = forward_backward(batches, scale)
                grads = [param.grad.flatten() for param in model.weights.values()]
                found.append((loss.item(), torch.cat(grads)))
                for param in model.weights.values():
                    param.grad = None
        with pytest.raises(ValueError, match=r"^a CUDA graph of inputs \[2, 8\] cannot take \[1, "):
            graphed.forward_backward([(x[:1], y[:1]) for x, y in batches], 1.0)
    return found


def test_each_step_has_its_own_inputs_scale_and_gradients(ranks1):
    (found,) = ranks1.run(graphed_and_plain)
    for (loss, grads), (graphed_loss, graphed_grads) in zip(found[::2], found[1::2]):
        assert graphed_loss == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(graphed_grads, grads, rtol=0, atol=1e-12)
