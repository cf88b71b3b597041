"""The figures of the course. Lessons write `from course.figures import plot`.

plot.py          the one door: every function that draws, nothing else
caption.py       the words of a lesson's figures, by name, from captions/NN.yaml
style.py         fonts, colours, and Picture: a figure that carries its alternative text
charts.py        lines, training curves, bars, matrices, weather maps      all lessons
collectives.py   what ranks hold before and after a collective; the ring   lessons 00, 01
messages.py      single messages between ranks, round by round             lesson 01
data_parallel.py a step, uneven shares, accumulation, memory, buckets      lessons 04, 05
overlap.py       what a core computes while the link carries buckets       lesson 05
grid.py          the ranks of a grid on their nodes, coloured by group     lessons 08, 15
rank_order.py    the digits of a rank, the links that leave a node         lesson 08
adapters.py      which adapters carry an all-reduce over two nodes       lesson 08
pipeline.py      stages and their messages; F, B, I, W of a pipeline       lessons 12, 15
timeline.py      who is busy when                                          any lesson
profile.py       where a recorded step's time went, and its memory         lessons 02, 16
tensor_flow.py   f and g around an MLP, columns and rows, DTensor layouts  lesson 09
weights.py       which rank holds which columns or rows of a weight        lesson 09
layer.py         what a layer keeps, and what travels around it            lesson 10
ring_attention.py  the ring of keys and values, its gradients, Ulysses       lesson 11
attention.py     which rank computes which part of the causal mask         lesson 11
jobs.py          who starts whom in a batch job; a job that lives twice    lesson 14
nodes.py         the links between ranks that NCCL's log names             lesson 14
tuning.py        documents in one row; an adapter beside its weight        lesson 25
"""
