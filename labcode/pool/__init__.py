"""A pool of ranks that stays alive between the cells of a notebook, or the tests of a session.

ranks       the pool: `Ranks(4).run(fn, ...)`
px          `%%px` cells on the same ranks
wire        how functions, arguments and results travel
answers     results, prints and failures of all ranks; the one error made of them
processes   the controller and the engines, as processes
record      what each rank has called last of torch.distributed: mismatches and hangs explained
recorder    how an engine writes that down
limits      what a pool needs of the machine, checked before it starts
turn        one call at a time; where Ctrl-C may be raised
family      the processes of a pool end one another
engine      what runs inside an engine: one rank
stopping    how an engine stops when it fails, or when the pool says so
"""
