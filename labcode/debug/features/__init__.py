"""Features for NVIDIA's nvdlfw_inspect, which reads every file of this folder by itself."""
