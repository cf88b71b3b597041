"""A pool of ranks that stays alive between the cells of a notebook, or the tests of a session.

ranks       the pool: `Ranks(4).run(fn, ...)`
cells       `%%px` cells on the same ranks
wire        how functions, arguments and results travel
answers     results and failures of all ranks; the one error made of them
processes   the processes of the ranks, forked from one that has torch; requests and answers
engine      what runs in the process of a rank
record      what each rank has called last of torch.distributed: mismatches and hangs explained
recorder    how a rank writes that down
limits      what a pool needs of the machine, checked before it starts
"""
