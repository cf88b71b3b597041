"""What goes wrong between ranks: found while a job runs, or afterwards in its logs.

hang        who waits for whom, while nothing moves
standing    where one rank stands: the collective it waits in, and its place in the code
nccl_log    who talks to whom over what, from NCCL's INFO log
nccl_lines  what one line of it says
nccl_graph  ranks, links and communicators as plain data
"""
