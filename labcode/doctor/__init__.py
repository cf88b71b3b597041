"""What the logs of a job tell about its faults.

nccl_log    who talks to whom over what, from NCCL's INFO log
nccl_lines  what one line of it says
nccl_graph  ranks, links and communicators as plain data
"""
