"""What a run resumes from, on any grid.

store       when a checkpoint is written, kept and read: all ranks together
folder      the files of one, and what it says of itself
tensors     a file of numbers for each rank, and where each tensor lies in them
state       the state of a run as named tensors
same_run    whether a checkpoint is of the run that wants to resume from it
gpt2        weights in the format of Hugging Face's GPT-2, out of a run and into one
"""
