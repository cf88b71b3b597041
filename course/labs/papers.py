"""Published numbers that lessons ask for: in a cell they would be read before they are predicted.

What a question gives stays in the lesson; here is what it asks for, each with its source.
"""

# Rajbhandari et al. 2019, arXiv:1910.02054, figure 1: GB of one of 64 ranks, 7.5e9 parameters
ZERO_GB = {"no ZeRO": 120, "stage 1": 31.4, "stage 2": 16.6, "stage 3": 1.9}

# Narayanan et al. 2021, arXiv:2104.04473, table 2: TFLOP/s of each GPU, by the number of GPUs
GPT3_TFLOP_PER_S = {384: 153, 768: 149, 1536: 141}

# The same, table 1: hidden size, layers, GPUs, tp, pp, sequences in a batch
MEGATRON_LAYOUTS = (
    (2304, 24, 32, 1, 1, 512),
    (3072, 30, 64, 2, 1, 512),
    (4096, 36, 128, 4, 1, 512),
    (6144, 40, 256, 8, 1, 1024),
    (8192, 48, 512, 8, 2, 1536),
    (10240, 60, 1024, 8, 4, 1792),
    (12288, 80, 1536, 8, 8, 2304),
    (16384, 96, 1920, 8, 16, 2160),
    (20480, 105, 2520, 8, 35, 2520),
    (25600, 128, 3072, 8, 64, 3072),
)

# Kokolis et al. 2024, arXiv:2410.21680: hours until a job of 1,024 GPUs fails
HOURS_TO_FAILURE = 7.9

# NERSC/sc25-dl-tutorial, a ViT on 16 A100, dp 4 with tp 4 or cp 4: samples/s and GiB in use
NERSC_SAMPLES_PER_S = {"tp": 126.4, "cp": 165.6, "tp, Transformer Engine": 156.8}
NERSC_GIB_IN_USE = {"tp": 29.3, "cp": 26.6, "tp, Transformer Engine": 21.3}
