"""Traces made by hand, in the format of the profiler of PyTorch, for steps whose faults are known.

The fields of GPU events are those that libkineto writes (src/output_json.cpp: device, context,
stream, correlation, grid, block, ...), as they also stand in the test data of Meta's
HolisticTraceAnalysis (tests/test_trace_filters.py and tests/data: "sm80_kernel" on stream 7,
"Memcpy HtoD (Pinned -> Device)" on stream 20); those of CPU events are from a trace of torch 2.13.
"""

from labcode.perf.chrome_trace import Trace

HOST = 4242  # process and main thread of the host


class MadeTrace:
    """A trace that grows; times in us."""

    def __init__(self, rank=0):
        self.entries = []
        self.correlation = 100
        self.rank = rank

    def add(self, name, category, start, stop, thread=(HOST, HOST), **args):
        entry = {"ph": "X", "cat": category, "name": name, "pid": thread[0], "tid": thread[1]}
        entry |= {"ts": start, "dur": stop - start, "args": args}
        self.entries.append(entry)
        return self

    def step(self, number, start, stop):
        return self.add(f"ProfilerStep#{number}", "user_annotation", start, stop)

    def part(self, name, start, stop):
        return self.add(name, "user_annotation", start, stop)

    def operation(self, name, start, stop):
        args = {"External id": len(self.entries), "Record function id": 0}
        return self.add(name, "cpu_op", start, stop, **args)

    def collective(self, name, start, stop):
        """A collective of gloo, on a thread of its own."""
        return self.add(name, "user_annotation", start, stop, (HOST, HOST + 81))

    def kernel(self, name, launch, start, stop, stream=7):
        """A kernel, and its launch, which takes 5 us of the host."""
        self.correlation += 1
        call = {"cbid": 211, "correlation": self.correlation, "External id": self.correlation}
        self.add("cudaLaunchKernel", "cuda_runtime", launch, launch + 5, **call)
        of_kernel = {
            "External id": self.correlation,
            "queued": 0,
            "device": 0,
            "context": 1,
            "stream": stream,
            "correlation": self.correlation,
            "registers per thread": 128,
            "shared memory": 13056,
            "blocks per SM": 0.72727275,
            "warps per SM": 2.909091,
            "grid": [8, 12, 1],
            "block": [128, 1, 1],
            "est. achieved occupancy %": 5,
        }
        return self.add(name, "kernel", start, stop, (0, stream), **of_kernel)

    def copy(self, launch, start, stop, stream=20):
        self.correlation += 1
        call = {"cbid": 41, "correlation": self.correlation}
        self.add("cudaMemcpyAsync", "cuda_runtime", launch, launch + 5, **call)
        of_copy = {
            "device": 0,
            "context": 1,
            "stream": stream,
            "correlation": self.correlation,
            "bytes": 1609728,
            "memory bandwidth (GB/s)": 50.45694762248065,
        }
        name = "Memcpy HtoD (Pinned -> Device)"
        return self.add(name, "gpu_memcpy", start, stop, (0, stream), **of_copy)

    def wait(self, start, stop):
        """The host waits for the GPU."""
        self.correlation += 1
        args = {"cbid": 131, "correlation": self.correlation}
        return self.add("cudaStreamSynchronize", "cuda_runtime", start, stop, **args)

    def content(self):
        labels = {"ph": "M", "name": "process_name", "ts": 0, "pid": HOST, "tid": 0}
        distributed = {"backend": "gloo", "rank": self.rank, "world_size": 2}
        return {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": distributed,
            "traceEvents": [labels | {"args": {"name": "python"}}, *self.entries],
        }

    def trace(self):
        return Trace(self.content())
