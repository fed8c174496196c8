"""Stands in for vLLM, of which SGLang takes one operator where it finds no accelerator (``vllm._custom_ops``)."""

__version__ = "0.0.0"
