"""Inference: launching servers, streaming from them, and swapping their weights. The only home of httpx."""
