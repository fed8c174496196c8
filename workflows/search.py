"""Questions of things that no model has heard of: what there is to know is in a corpus, and the model may search it.

The corpus is a file of documents, one a line, each with a ``title`` and a ``text``; to search another one, point CORPUS
at it and give rows with a ``question`` and an ``answer``.
"""

import json
from functools import cache
from pathlib import Path

import bm25s

from areal_async import Policy, Prompt, ToolError
from rewards.math_answer import final_number_matches

CORPUS = Path(__file__).parents[1] / "configs" / "data" / "search_corpus.jsonl"
NUM_RESULTS = 2
MAX_QUERY_CHARACTERS = 200


async def search(prompt: Prompt, policy: Policy) -> float:
    """Answer one question with the corpus at hand; 1.0 when the final number is right."""
    done = await policy.act([{"role": "user", "content": prompt["question"]}], [look_up], max_turns=4)
    return await final_number_matches(done.text, prompt["answer"]) if done.is_finished else 0.0


async def look_up(query: str) -> str:
    """Search the corpus; return the documents that fit best, the best one first.

    Args:
        query: words that the document should hold, such as the name of a thing.
    """
    if len(query) > MAX_QUERY_CHARACTERS:
        raise ToolError(f"got {len(query)} characters, need at most {MAX_QUERY_CHARACTERS}")
    texts, index = corpus()
    tokens = bm25s.tokenize([query], show_progress=False)
    numbers, scores = index.retrieve(tokens, k=min(NUM_RESULTS, len(texts)), show_progress=False)
    found = [texts[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]
    return "\n".join(found) or "nothing found"


@cache
def corpus() -> tuple[list[str], bm25s.BM25]:
    """Return the documents and their index (Okapi BM25, in Lucene's form), read once."""
    with CORPUS.open(encoding="utf-8") as lines:
        documents = [json.loads(line) for line in lines]
    texts = [f"{document['title']}: {document['text']}" for document in documents]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return texts, index
