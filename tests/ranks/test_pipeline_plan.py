"""A schedule is worked out once for a run, not at every step: planning is Python over all ranks."""

STEPS = 4
MICROBATCHES = 4


def simulations_of_each_step(rank):
    """How often the schedule was simulated in each step of training, and in each validation."""
    import torch

    from labcode.comm.grid import Grid
    from labcode.config import GPTConfig, ParallelConfig
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize
    from labcode.schedules import evaluation_plan, plan_pipeline, simulation
    from labcode.schedules import pipeline_plan as plan_module
    from labcode.topology import GridShape

    plan_pipeline.cache_clear()
    evaluation_plan.cache_clear()
    config = GPTConfig(vocab_size=16, context_length=8, num_layers=2, hidden_size=8, num_heads=2)
    model = parallelize(GPT(config), Grid.create(GridShape(pp=2)), ParallelConfig(pp=2))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    batches = [(tokens, tokens)] * MICROBATCHES

    real = simulation.simulate_order
    calls = []

    def noted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    counts = []
    modules = (simulation, plan_module)
    for module in modules:
        module.simulate_order = noted
    try:
        for work in [model.forward_backward] * STEPS + [model.losses] * STEPS:
            calls.clear()
            work(batches)
            counts.append(len(calls))
    finally:
        for module in modules:
            module.simulate_order = real
    return counts[:STEPS], counts[STEPS:]


def test_a_schedule_is_simulated_in_the_first_step_alone(ranks2):
    for training, validation in ranks2.run(simulations_of_each_step):
        assert training == [1] + [0] * (STEPS - 1)
        # validation has an order of its own, and a pipeline for another number of micro-batches
        assert validation[0] in (1, 2)
        assert validation[1:] == [0] * (STEPS - 1)
