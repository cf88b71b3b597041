"""A learner and a generator on disjoint ranks: the same text, likelihoods and training as alone."""

import pytest
import torch
import torch.distributed as dist

from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig
from labcode.models.generate import generate
from labcode.models.gpt import GPT
from labcode.models.layers import initialize
from labcode.models.parallelize import parallelize
from labcode.parallel import reshard
from labcode.topology import GridShape
from labcode.train import brackets, grpo, rollouts

CONFIG = GPTConfig(
    vocab_size=brackets.VOCAB_SIZE, context_length=16, num_layers=2, num_heads=2, hidden_size=16
)
DEPTH = 3
NUM_PROMPTS = 4
GROUP_SIZE = 6
OPTIONS = grpo.GRPO(average="token")  # the answers of a rank have more tokens than those of others
OURS = ParallelConfig(data_parallel="labcode")
FSDP = ParallelConfig(data_parallel="labcode", zero_stage=3)
STEPS = 3
SEED = 5


@pytest.fixture(scope="module")
def started():
    """The weights of a model that closes some brackets, as learners start from them."""
    model = initialize(GPT(CONFIG), 1)
    random = torch.Generator().manual_seed(1)
    brackets.supervised_start(model, 60, DEPTH, random, learning_rate=1e-2)
    return model.state_dict()


def learner_of(started):
    model = GPT(CONFIG)
    model.load_state_dict(started)
    return model.double()


def draw(model, random, version):
    prompts = brackets.draw_prompts(NUM_PROMPTS, DEPTH, random).repeat_interleave(GROUP_SIZE, 0)
    return rollouts.draw(model, prompts, DEPTH + 1, random, end=brackets.END, version=version)


def learn(model, optimizer, batch):
    rewards = brackets.rewards(batch.tokens[:, :DEPTH], batch.tokens[:, DEPTH:])
    rewards = rewards.view(NUM_PROMPTS, GROUP_SIZE)
    grpo.learn(model, optimizer, batch, rewards, OPTIONS)


def alone(started):
    """(tokens and log-probabilities of each step, weights) of one process, which does both."""
    model = parallelize(learner_of(started), Grid.create(GridShape()), OURS)
    optimizer = torch.optim.AdamW(model.weights.values(), lr=1e-2)
    random = torch.Generator().manual_seed(SEED)
    drawn = []
    for step in range(STEPS):
        batch = draw(model, random, step)
        drawn.append((batch.tokens, batch.log_probs))
        learn(model, optimizer, batch)
    return drawn, {name: weight.clone() for name, weight in model.full_state_dict()}


def in_two_fleets(rank, started, shapes, parallel, forget=False, max_lag=0):
    """The same on two fleets; the generator has other weights until it gets those of the learner.

    Args:
        forget: Send the weights before the first step only.
    """
    number, grid = Grid.fleets(*shapes)
    is_learner = number == 0
    whole = learner_of(started) if is_learner else initialize(GPT(CONFIG), 2).double()
    model = parallelize(whole, grid, parallel if is_learner else OURS)
    world = dist.group.WORLD
    moves = reshard.plan(
        *reshard.layouts_of_fleets(reshard.boxes_of_model(model), is_learner, world)
    )
    optimizer = torch.optim.AdamW(model.weights.values(), lr=1e-2)
    random = torch.Generator().manual_seed(SEED)
    first_generator = shapes[0].world_size
    drawn = []
    off = 0.0
    version = -1
    for step in range(STEPS):
        if step == 0 or not forget:
            parts = reshard.parts_of(model)
            version = reshard.exchange(moves, parts, step, world, torch.float64)
        reshard.check_lag(version, step, max_lag)
        batch = rollouts.empty(NUM_PROMPTS * GROUP_SIZE, DEPTH, DEPTH + 1)
        if not is_learner:
            batch = draw(model, random, version)
        batch = rollouts.share(batch, first_generator, world)
        assert batch.version == version
        drawn.append((batch.tokens, batch.log_probs))
        if is_learner:
            with torch.no_grad():
                again = grpo.token_log_probs(model, batch.tokens, DEPTH + 1)
            off = max(off, ((again - batch.log_probs) * batch.counts).abs().max().item())
            learn(model, optimizer, batch)
    weights = {name: weight.clone() for name, weight in model.full_state_dict()}
    return is_learner, drawn, off, weights


LAYOUTS = {
    "fsdp 2 and tp 2": ((GridShape(dp=2), GridShape(tp=2)), FSDP),
    "dp 3 and 1": ((GridShape(dp=3), GridShape()), OURS),
}


@pytest.mark.parametrize(("shapes", "parallel"), LAYOUTS.values(), ids=LAYOUTS)
def test_two_fleets_train_as_one_process(ranks1, ranks4, started, shapes, parallel):
    ((expected, weights),) = ranks1.run(alone, started)
    for is_learner, drawn, off, own in ranks4.run(in_two_fleets, started, shapes, parallel):
        for (tokens, log_probs), (same_tokens, same_log_probs) in zip(drawn, expected, strict=True):
            assert torch.equal(tokens, same_tokens)
            assert (log_probs - same_log_probs).abs().max() < 1e-9
        assert off < 1e-12  # learner and generator say how likely a token is
        if is_learner:
            for name, weight in weights.items():
                assert (own[name] - weight).abs().max() < 1e-9, name
    texts = [tokens for tokens, _ in expected]
    assert not torch.equal(texts[0], texts[1])


def test_a_generator_that_was_not_updated_is_refused(ranks4, started):
    shapes, parallel = LAYOUTS["fsdp 2 and tp 2"]
    with pytest.raises(Exception, match="version 0 of the weights is 1 updates behind"):
        ranks4.run(in_two_fleets, started, shapes, parallel, forget=True)
    # Where it is allowed, learner and generator no longer agree on how likely a token is.
    found = ranks4.run(in_two_fleets, started, shapes, parallel, forget=True, max_lag=STEPS - 1)
    for is_learner, _, off, _ in found:
        assert (off > 1e-3) == is_learner


UNEVEN = GPTConfig(
    vocab_size=23,
    context_length=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    hidden_size=16,
    positions="rotary",
)


def generated(rank, temperature):
    """What one process generates, and what two ranks of tp do with parts of the heads."""
    from functools import partial

    from labcode.parallel.tensor import whole_logits

    model = initialize(GPT(UNEVEN), 3).double()
    with torch.no_grad():
        for param in model.parameters():
            param *= 8
    prompts = torch.randint(23, (5, 4), generator=torch.Generator().manual_seed(1))
    options = {"temperature": temperature}
    expected = generate(model, prompts, 9, generator=torch.Generator().manual_seed(2), **options)
    parallel = parallelize(model, Grid.create(GridShape(tp=2)), OURS)
    whole = partial(whole_logits, group=parallel.grid.group("tp"), vocab_size=23)
    found = generate(
        parallel.module,
        prompts,
        9,
        generator=torch.Generator().manual_seed(2),
        whole=whole,
        **options,
    )
    return expected, found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cache_under_tp_gives_the_text_of_one_process(ranks2, temperature):
    for expected, found in ranks2.run(generated, temperature):
        assert torch.equal(found[0], expected[0])
        assert (found[1] - expected[1]).abs().max() < 1e-12
