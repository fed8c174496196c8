"""An inference server for Hugging Face causal language models that speaks SGLang's protocol.

It serves small models on a CPU and real ones on a CUDA device, with continuous batching over a key-value cache of its
own, so that a whole run works where SGLang cannot be installed. Routes, fields and semantics follow SGLang 0.5.23
started with ``--incremental-streaming-output``; what is not supported is refused, never ignored.

Started with ``--is-embedding`` it serves a sequence classifier instead: ``/classify`` answers with its head's output at
the last token, the score of a reward model.

Invariants: one thread owns the model, so weights change only between two steps of the batch; every output token is
stamped with the weights version that produced it; a swap happens whole or not at all.

Run: ``python -m areal_async.inference.embedded --model-path PATH --port N`` (``--help`` lists the options).

The road of a request::

    http/ and service.py (asyncio: HTTP, text) -> worker.py (the model thread)
        -> scheduler.py (who runs) -> runner.py (forward)
"""
