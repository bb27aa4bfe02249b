"""Benchmarks of flashmsa beside other attention kernels. Entry point: run.py; how to read it: README.md."""
